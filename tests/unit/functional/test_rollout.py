from __future__ import annotations

import pytest
import torch

from rlhf_lightning.functional import part_metrics, rollout_metrics, row_totals
from tests.unit.functional import slow
from tests.unit.functional.cases import close, mask_of, noise, valid


def test_totals_of_rows(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    scores = noise(mask, 0, dtype=dtype)
    rows = slow.rows_of(scores, mask)
    found = row_totals(scores, mask)
    close(found["row_scores"], [sum(row) for row in rows])
    assert found["row_tokens"].tolist() == [len(row) for row in rows]
    assert found["row_ends"].tolist() == [
        max([0, *(place + 1 for place in valid(mask, b))]) for b in range(len(mask))
    ]


def test_metrics_by_hand() -> None:
    found = rollout_metrics(
        torch.tensor([1.0, 3.0, -1.0, 1.0]),
        torch.tensor([4, 2, 4, 0]),
        torch.tensor([True, False, True, False]),
    )
    assert found == pytest.approx(
        {
            "reward/mean": 1.0,
            "reward/std": 2**0.5,
            "reward/min": -1.0,
            "reward/max": 3.0,
            "response/tokens": 10.0,
            "response/length_mean": 2.5,
            "response/length_max": 4.0,
            "response/truncated": 0.5,
        }
    )


def test_answers_that_nothing_has_scored_have_lengths() -> None:
    found = rollout_metrics(None, torch.tensor([4, 2]), torch.tensor([True, False]))
    assert {name.partition("/")[0] for name in found} == {"response"}


def test_each_of_several_functions_by_hand() -> None:
    nan = torch.nan
    parts = torch.tensor([[1.0, nan, nan, 4.0], [3.0, 5.0, nan, 4.0]])
    found = part_metrics(
        ["exact_match", "mine.rewards.brevity", "mine.rewards.unused", "http://host:80/score/"], parts
    )
    assert found == {
        "reward/exact_match": 2.0,
        "reward/exact_match_std": 1.0,
        "reward/brevity": 5.0,
        "reward/brevity_std": 0.0,
        "reward/score": 4.0,
        "reward/score_std": 0.0,
    }
    assert set(part_metrics(["mine.f", "theirs.f"], parts[:, :2])) >= {"reward/mine.f", "reward/theirs.f"}
    assert part_metrics(["exact_match"], parts[:, :1]) == {}
    assert set(part_metrics(["mine.mean", "mine.f"], parts[:, :2])) == {
        "reward/mine.mean",
        "reward/mine.mean_std",
        "reward/f",
        "reward/f_std",
    }
