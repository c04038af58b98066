from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import Counts, ValueLoss, clipped_value_loss
from tests.unit.functional.cases import close, mask_of, valid
from tests.unit.functional.rows import batch_of


def test_value_loss_by_hand() -> None:
    old, returns = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, -1.0, 1.0]])
    values = torch.tensor([[0.1, 0.5, 0.5, -0.5]])
    loss, clipped = clipped_value_loss(values, old, returns, clip=0.2)
    close(loss, [[0.405, 0.32, 1.125, 1.125]])  # 0.5 * (0.9^2, 0.8^2 held at 0.2, 1.5^2, 1.5^2)
    assert clipped.tolist() == [[False, True, False, False]]
    close(clipped_value_loss(values, old, returns, clip=None)[0], [[0.405, 0.125, 1.125, 1.125]])


def test_a_value_within_the_limits_is_not_clipped() -> None:
    """Values of a fresh head are small, and change by as much as they are."""
    old, values, returns = torch.randn(3, 1, 1000, generator=torch.Generator().manual_seed(0)) * 0.05
    held = (values - old).abs() < 0.19
    loss, clipped = clipped_value_loss(values, old, returns, clip=0.2)
    assert not clipped[held].any()
    assert torch.equal(loss[held], 0.5 * (values - returns).square()[held])


def test_value_loss_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    outputs, rows = batch_of(mask, dtype)
    loss, metrics = ValueLoss(clip=0.3)(outputs, rows, Counts.of(mask))
    total = error = clips = values = returns = 0.0
    count = max(int(mask.sum()), 1)
    for b in range(len(mask)):
        for t in valid(mask, b):
            v, old, target = (
                float(outputs["values"][b, t]),
                float(rows["values"][b, t]),
                float(rows["returns"][b, t]),
            )
            held = min(max(v, old - 0.3), old + 0.3)
            total += 0.5 * max((v - target) ** 2, (held - target) ** 2)
            error += (v - target) ** 2
            values, returns = values + v, returns + target
            clips += (held - target) ** 2 > (v - target) ** 2
    close(loss, total / count)
    close(metrics["critic/loss"], float(loss))
    close(ValueLoss(clip=0.3, coef=0.5)(outputs, rows, Counts.of(mask))[0], 0.5 * total / count)
    close(metrics["critic/squared_error"], error / count)
    close(metrics["critic/clip_fraction"], clips / count)
    close(metrics["critic/values"], values / count)
    close(metrics["critic/returns"], returns / count)


def test_missing_clip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"clip=0\.0.*None for no clip"):
        ValueLoss(clip=0.0)


@pytest.mark.parametrize("coef", [-1.0, 0.0, math.nan])
def test_values_are_drawn_to_the_returns(coef: float) -> None:
    with pytest.raises(ValueError, match=rf"^ValueLoss\(coef={coef}\): must be above 0\. Try 1\.0; a critic"):
        ValueLoss(coef=coef)
