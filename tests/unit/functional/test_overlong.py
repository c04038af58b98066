from __future__ import annotations

import pytest
import torch

from rlhf_lightning.functional import Overlong, overlong_penalty
from tests.unit.functional.cases import close


def test_by_hand() -> None:
    lengths = torch.tensor([0, 5, 15, 16, 18, 20])
    close(overlong_penalty(lengths, max_tokens=20, buffer=5), [0, 0, 0, -0.2, -0.6, -1])
    found = Overlong(buffer=10, factor=0.5).penalty(lengths, max_tokens=20)
    close(found, [0, 0, -0.25, -0.3, -0.4, -0.5])
    assert found.dtype == torch.float32
    assert not Overlong(buffer=10, factor=0.0).penalty(lengths, max_tokens=20).any()


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"max_tokens=20, buffer=21.*0 < buffer <= 20"):
        Overlong(buffer=21).penalty(torch.tensor([3]), max_tokens=20)
    with pytest.raises(ValueError, match=r"buffer=0.*Try a fifth"):
        Overlong(buffer=0)
    with pytest.raises(ValueError, match=r"factor=-1\.0"):
        Overlong(buffer=1, factor=-1.0)
