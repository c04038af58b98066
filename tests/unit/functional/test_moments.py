from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import mean_std, merged


def taken_in(numbers: Tensor, *, parts: int) -> Tensor:
    state = torch.zeros(3, dtype=torch.float64)
    for part in numbers.double().chunk(parts):
        state = merged(state, part.sum(), part.square().sum(), len(part))
    return state


@pytest.mark.parametrize("shift", [0.0, -3.0, 1000.0])
def test_against_python(shift: float) -> None:
    numbers = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2 + shift
    for parts in (1, 2, 7, 50):
        state = taken_in(numbers, parts=parts)
        mean, std = mean_std(state)
        assert state[0] == 50
        assert mean == pytest.approx(statistics.fmean(numbers.tolist()), abs=1e-12)
        # squares of 1000 cost six of sixteen digits of the variance
        assert std == pytest.approx(statistics.pstdev(numbers.tolist()), rel=1e-9)


def test_by_hand() -> None:
    state = merged(torch.zeros(3, dtype=torch.float64), 3.0, 5.0, 2)  # 1 and 2
    assert state.tolist() == [2.0, 1.5, 0.5]
    state = merged(state, 6.0, 36.0, 1)  # and 6
    assert state.tolist() == pytest.approx([3.0, 3.0, 14.0])
    assert mean_std(state) == pytest.approx((3.0, (14 / 3) ** 0.5))


def test_plain_numbers_keep_their_digits() -> None:
    assert merged(torch.zeros(3, dtype=torch.float64), 0.1, 0.01, 1)[1] == 0.1


def test_nothing_new_changes_nothing() -> None:
    state = torch.tensor([4.0, 1.0, 2.0], dtype=torch.float64)
    assert merged(state, 0.0, 0.0, 0).tolist() == state.tolist()
    assert mean_std(torch.zeros(3, dtype=torch.float64)) == (0.0, 1.0)


@pytest.mark.parametrize("number", [0.0, 0.3, 1e-20, -1e6 / 3])
def test_equal_numbers_have_unit_scale(number: float) -> None:
    """Rounding leaves a variance of 1e-16 of the mean's square: no unit to divide by."""
    for count in (1, 7, 65):
        mean, std = mean_std(taken_in(torch.full((count,), number, dtype=torch.float64), parts=3))
        assert mean == pytest.approx(number, rel=1e-6)
        assert std == 1
