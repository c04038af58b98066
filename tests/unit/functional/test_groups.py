from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import (
    group_advantages,
    group_std,
    leave_one_out,
    optimal_baseline,
    spread,
    tied_share,
    varied_groups,
)
from tests.unit.functional.cases import close, mask_of


def test_group_advantages_by_hand() -> None:
    scores = torch.tensor([1.0, 5.0, 3.0, 7.0, 0.1, 0.1, 0.1, 4.0])
    groups = torch.tensor([10, 30, 10, 30, 20, 20, 20, 40])  # interleaved; zero variance; one alone
    half = math.sqrt(0.5)  # deviation 1 over the unbiased standard deviation sqrt(2)
    close(group_advantages(scores, groups), [-half, -half, half, half, 0, 0, 0, 0])
    close(group_advantages(scores, groups, scale="none"), [-1, -1, 1, 1, 0, 0, 0, 0])
    assert group_advantages(scores, groups, single="score")[-1] == pytest.approx(4 / (1 + 1e-6))
    assert group_advantages(scores, groups, single="score", scale="none")[-1] == 4


@pytest.mark.parametrize("size", [1e18, 1e20, 1e38])
def test_scores_whose_squares_are_beyond_float32(size: float) -> None:
    scores, groups = torch.tensor([size, -size]), torch.zeros(2, dtype=torch.int64)
    assert group_std(scores, groups).dtype == torch.float32
    close(group_std(scores, groups) / size, [math.sqrt(2.0)] * 2)
    close(group_advantages(scores, groups), [math.sqrt(0.5), -math.sqrt(0.5)])


def test_equal_scores_give_exactly_zero() -> None:
    scores, groups = torch.full((8,), 0.3), torch.zeros(8, dtype=torch.int64)
    counts = torch.arange(8) < 7
    rounded = scores[:7] - scores[:7].sum() / 7
    assert rounded.abs().max() > 0  # 3e-8, which divided by 0 + 1e-9 is an advantage of 30
    for valid_rows in (counts, None):
        assert group_advantages(scores, groups, valid=valid_rows, eps=1e-9).tolist() == [0.0] * 8
        assert group_advantages(scores, groups, valid=valid_rows, eps=0.0).tolist() == [0.0] * 8
    assert group_advantages(scores * counts, groups, valid=counts, scale="none").tolist() == [0.0] * 8


def test_masked_row_does_not_count_in_its_group() -> None:
    scores, groups = torch.tensor([1.0, 3.0, torch.nan]), torch.zeros(3, dtype=torch.int64)
    counts = torch.tensor([True, True, False])
    close(group_advantages(scores, groups, valid=counts, scale="none"), [-1, 1, 0])
    nobody = group_advantages(scores, groups, valid=torch.zeros(3, dtype=torch.bool), single="score")
    assert nobody.tolist() == [0.0, 0.0, 0.0]
    assert leave_one_out(scores, groups, valid=scores == 3, single="score").tolist() == [0.0, 3.0, 0.0]


def test_leave_one_out_by_hand() -> None:
    scores = torch.tensor([1.0, 5.0, 3.0, 7.0, 0.1, 0.1, 0.1, 4.0, 8.0])
    groups = torch.tensor([10, 30, 10, 30, 20, 20, 20, 40, 10])
    close(leave_one_out(scores, groups), [-4.5, -2, -1.5, 2, 0, 0, 0, 0, 6])  # 1 - (3 + 8) / 2, ...
    assert leave_one_out(scores, groups, single="score")[-2] == 4


def test_optimal_baseline_by_hand() -> None:
    scores = torch.tensor([1.0, 0.0, 0.0, 5.0])
    groups = torch.tensor([0, 0, 0, 1])
    lengths = torch.tensor([30, 10, 60, 7])
    close(optimal_baseline(scores, lengths, groups), [0.7, -0.3, -0.3, 0.0])  # 30 / 100
    assert optimal_baseline(scores, lengths, groups, single="score")[-1] == 5
    same = optimal_baseline(scores, torch.full((4,), 9), groups)
    close(same, group_advantages(scores, groups, scale="none"))  # of equal lengths it is the mean


def test_equal_scores_beat_no_baseline() -> None:
    scores, groups = torch.full((7,), 0.3), torch.zeros(7, dtype=torch.int64)
    assert leave_one_out(scores, groups).tolist() == [0.0] * 7
    assert optimal_baseline(scores, torch.arange(7) + 1, groups).tolist() == [0.0] * 7
    assert group_std(scores, groups).tolist() == [0.0] * 7


def test_varied_groups() -> None:
    scores = torch.tensor([1.0, 1.0, 1.0, 0.3, 0.3, 0.3, 0.0, 0.0, 1.0])
    assert varied_groups(scores, 3).tolist() == [False, False, True]
    assert varied_groups(scores[:0], 3).tolist() == []
    with pytest.raises(ValueError, match=r"9 scores, group_size=2.*multiple of group_size"):
        varied_groups(scores, 2)
    with pytest.raises(ValueError, match="group_size=1"):
        varied_groups(scores, 1)


def test_share_of_ties_by_hand() -> None:
    scores = torch.tensor([0.3, 1.0, 0.3, 2.0, 0.3, 7.0, 0.0])
    groups = torch.tensor([10, 30, 10, 30, 10, 20, 30])  # interleaved; all the same, varied, one alone
    assert tied_share(scores, groups) == 0.5
    assert tied_share(scores[5:], groups[5:]) is None
    assert tied_share(scores[:0], groups[:0]) is None


def test_no_rows() -> None:
    nothing, groups = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert group_advantages(nothing, groups).shape == (0,)
    assert leave_one_out(nothing, groups).shape == (0,)
    assert optimal_baseline(nothing, nothing, groups).shape == (0,)


def test_spread(case: str) -> None:
    mask = mask_of(case)
    advantages = torch.tensor([1.0, -2.0, 3.0, -4.0])
    expected = [[float(advantages[b]) if mask[b, t] else 0.0 for t in range(mask.shape[1])] for b in range(4)]
    close(spread(advantages, mask), expected)
    with pytest.raises(
        ValueError, match=r"^spread\(\[4, \d+\], mask \[4, \d+\]\): .* by masked_sum\(x, mask"
    ):
        spread(mask.float(), mask)
