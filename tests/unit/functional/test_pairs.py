"""Pairs of which one answer has no token: they teach nothing, and count for nothing."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.functional import Counts, DPOLoss, PairwiseLoss, SimPOLoss
from rlhf_lightning.functional.cost_model import CostLoss
from rlhf_lightning.functional.pairs import PairLoss

LOSSES: dict[str, tuple[PairLoss, int]] = {
    "dpo": (DPOLoss(), 2),
    "dpo, likelihood": (DPOLoss(sft_coef=1.0), 2),
    "simpo": (SimPOLoss(), 2),
    "reward model": (PairwiseLoss(), 3),
    "cost model": (CostLoss(), 3),
}
"""With the tokens that it counts of a pair of two tokens and one."""


@pytest.mark.parametrize("name", LOSSES)
def test_halves_of_pairs_are_not_counted(name: str) -> None:
    loss, tokens = LOSSES[name]
    halves = torch.tensor([[1, 1], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0]], dtype=torch.bool)
    whole = torch.tensor([[1, 1], [0, 1]], dtype=torch.bool)
    assert loss.count({"response_mask": halves}) == Counts(0, 0, 0)
    both = loss.count({"response_mask": torch.cat([halves, whole])})
    assert both == Counts(tokens=tokens, sequences=2, groups=1)
