from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import CISPOLoss, Counts
from tests.unit.functional.cases import close
from tests.unit.functional.rows import gradient


def test_by_hand() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    outputs = {"log_probs": torch.tensor([[-1.0, -1.0]])}
    old = torch.tensor([[-1.0 - math.log(4.0), -1.0 + math.log(4.0)]])  # ratios 4 and 1 / 4
    rows = {"response_mask": mask, "log_probs": old, "advantages": torch.tensor([[1.0, 1.0]])}
    loss = CISPOLoss(clip_low=0.5, clip_high=1.0, track_entropy=False)
    close(loss(outputs, rows, Counts.of(mask))[0], (2.0 + 0.5) / 2)
    close(gradient(loss, outputs, rows), [[-1.0, -0.25]])  # a clipped token learns on


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"absolute_high=True, clip_high=0\.2.*Try 5\.0"):
        CISPOLoss(absolute_high=True)
    with pytest.raises(ValueError, match=r"clip_low=10"):
        CISPOLoss(clip_low=10.0)
    with pytest.raises(ValueError, match=r"dual_clip=3\.0.*no dual clip"):
        CISPOLoss(dual_clip=3.0)
