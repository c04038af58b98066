from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_lightning.functional import whiten
from tests.unit.functional.cases import close


def test_by_hand() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    x = torch.tensor([[1.0, 2.0], [3.0, 99.0]])
    close(whiten(x, mask), [[-1.0, 0.0], [1.0, 0.0]])  # unbiased variance 1
    close(whiten(x.bfloat16(), mask), [[-1.0, 0.0], [1.0, 0.0]])
    root = math.sqrt(1.5)  # biased variance 2/3
    close(whiten(x, mask, unbiased=False), [[-root, 0.0], [root, 0.0]])
    close(whiten(x, mask, eps=3.0), [[-0.5, 0.0], [0.5, 0.0]])  # sqrt(1 + 3)


def test_equal_numbers_give_exactly_zero() -> None:
    mask = torch.ones(1, 7, dtype=torch.bool)
    assert torch.equal(whiten(torch.full((1, 7), 0.3), mask), torch.zeros(1, 7))


def test_variance_does_not_cancel() -> None:
    x = torch.tensor([[1e6, 1e6 + 1, 1e6 + 2]])  # a float32 sum of squares has no digit left for the variance
    close(whiten(x, torch.ones_like(x, dtype=torch.bool)), [[-1.0, 0.0, 1.0]])


def test_adds_in_float64_twice_whatever_the_rows() -> None:
    for rows in (0, 3):
        asked: list[Tensor] = []

        def add(x: Tensor, asked: list[Tensor] = asked) -> Tensor:
            asked.append(x)
            return x

        mask = torch.zeros(rows, 4, dtype=torch.bool)
        assert whiten(torch.zeros(rows, 4), mask, add=add).shape == (rows, 4)
        assert [(x.dtype, x.numel()) for x in asked] == [(torch.float64, 2), (torch.float64, 1)]
