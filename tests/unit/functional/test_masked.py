from __future__ import annotations

import statistics
from itertools import accumulate, pairwise

import torch

from rlhf_lightning.functional import (
    at_last_valid,
    last_valid,
    masked_mean,
    masked_sum,
    turn_ids,
    zero_masked,
)
from tests.unit.functional.cases import close, mask_of, noise, valid


def test_sums_and_means_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    x = noise(mask, 0, dtype=dtype)
    rows = [[float(x[b, t]) for t in valid(mask, b)] for b in range(len(mask))]
    flat = [number for row in rows for number in row]
    close(masked_sum(x, mask), sum(flat))
    close(masked_sum(x, mask, dim=1), [sum(row) for row in rows])
    close(masked_mean(x, mask), statistics.fmean(flat) if flat else 0.0)
    close(masked_mean(x, mask, dim=1), [statistics.fmean(row) if row else 0.0 for row in rows])


def test_last_valid(case: str) -> None:
    mask = mask_of(case)
    x = noise(mask, 1)
    last = [valid(mask, b)[-1:] for b in range(len(mask))]
    close(last_valid(x, mask), [float(x[b, t[0]]) if t else 0.0 for b, t in enumerate(last)])
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    placed = torch.zeros(mask.shape)
    for b, t in enumerate(last):
        if t:
            placed[b, t[0]] = scores[b]
    close(at_last_valid(scores, mask), placed)


def test_turns_are_told_by_what_stands_between_them(case: str) -> None:
    mask = mask_of(case)
    expected = torch.zeros(mask.shape, dtype=torch.int64)
    for b in range(len(mask)):
        places = valid(mask, b)
        gaps = [0, *(after - before > 1 for before, after in pairwise(places))]
        for t, number in zip(places, accumulate(gaps), strict=bool(places)):
            expected[b, t] = number
    assert torch.equal(turn_ids(mask), expected)


def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 3), (2, 0), (0, 0)):
        x, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        assert masked_mean(x, mask) == 0
        assert last_valid(x, mask).tolist() == [0.0] * shape[0]
        assert at_last_valid(torch.ones(shape[0]), mask).shape == turn_ids(mask).shape == shape


def test_gradient_ignores_what_lies_under_the_mask(case: str) -> None:
    mask = mask_of(case)
    x = noise(mask, 2).requires_grad_()
    torch.autograd.backward(zero_masked(x, mask).exp().sum())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(mask, x.detach().exp(), 0.0))


def test_bfloat16_is_added_in_float32() -> None:
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)  # a bfloat16 sum sticks at 256
    total = masked_sum(x, torch.ones_like(x, dtype=torch.bool))
    assert total.dtype == torch.float32
    assert total == 4096
