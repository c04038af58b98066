from __future__ import annotations

import statistics
from itertools import product

import pytest
import torch

from rlhf_lightning.functional import Baseline, GroupEstimator, Overlong, Scale, Single
from tests.unit.functional import slow
from tests.unit.functional.cases import MASKS, close, mask_of, valid
from tests.unit.functional.estimators import columns_of
from tests.unit.functional.rows import laid_out

EPS = 1e-4


def slow_outcomes(columns: dict[str, torch.Tensor], width: int) -> tuple[list[float], list[int]]:
    """Summed scores less the penalty on the last 2 positions and 0.1 of the summed divergence; lengths."""
    names = ("scores", "log_probs", "ref_log_probs")
    mask = columns["response_mask"]
    rows = zip(*(slow.rows_of(columns[name], mask) for name in names), strict=True)
    outcomes, lengths = [], []
    for b, (scores, new, ref) in enumerate(rows):
        end = max([0, *(place + 1 for place in valid(mask, b))])  # gaps take room
        d = sum(p - q for p, q in zip(new, ref, strict=True))
        buffer = min(2, width)
        outcomes.append(sum(scores) - 0.5 * max(end - (width - buffer), 0) / buffer - 0.1 * d)
        lengths.append(len(scores))
    return outcomes, lengths


def slow_advantages(outcomes: list[float], lengths: list[int], estimator: GroupEstimator) -> list[float]:
    out = []
    for i, own in enumerate(outcomes):
        start = i // estimator.group_size * estimator.group_size
        same = [j for j in range(start, start + estimator.group_size) if lengths[j]]
        if i not in same or len(same) == 1:
            lone = own if estimator.single == "score" and lengths[i] else 0.0
            out.append(lone / (1 + EPS) if estimator.scale == "std" else lone)
            continue
        if estimator.baseline == "mean":
            base = statistics.fmean(outcomes[j] for j in same)
        elif estimator.baseline == "leave_one_out":
            base = statistics.fmean(outcomes[j] for j in same if j != i)
        else:
            base = sum(lengths[j] * outcomes[j] for j in same) / sum(lengths[j] for j in same)
        std = statistics.stdev(outcomes[j] for j in same)
        out.append((own - base) / (std + EPS if estimator.scale == "std" else 1))
    return out


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "length_weighted"])
def test_against_python(baseline: Baseline, dtype: torch.dtype) -> None:
    scales: tuple[Scale, ...] = ("std", "none")
    singles: tuple[Single, ...] = ("zero", "score")
    for case, scale, single in product(MASKS, scales, singles):
        mask = mask_of(case)
        columns = columns_of(mask, dtype)
        overlong = Overlong(buffer=min(2, mask.shape[1]), factor=0.5)
        estimator = GroupEstimator(
            group_size=2,
            baseline=baseline,
            scale=scale,
            single=single,
            eps=EPS,
            overlong=overlong,
            kl_coef=0.1,
        )
        found = estimator(columns)
        outcomes, lengths = slow_outcomes(columns, mask.shape[1])
        advantages = slow_advantages(outcomes, lengths, estimator)
        close(
            found["advantages"], laid_out(mask, [[a] * n for a, n in zip(advantages, lengths, strict=True)])
        )
        close(found["row_scores"], [sum(row) for row in slow.rows_of(columns["scores"], mask)])
        assert found["row_tokens"].tolist() == lengths


def test_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    scores = torch.tensor([[0, 0, 0, 1.0], [0, 9, 9, 9], [3.0, 0, 9, 9], [0, 0, 2, 9]])
    rows = {"response_mask": mask, "scores": scores}

    def found(group_size: int, baseline: Baseline = "mean", **fields: object) -> list[float]:
        estimator = GroupEstimator(group_size=group_size, baseline=baseline, scale="none", **fields)  # type: ignore[arg-type]
        return estimator(rows)["advantages"][:, 0].tolist()

    assert found(4) == [-0.5, -1.5, 1.5, 0.5]
    assert found(2) == [0.5, -0.5, 0.5, -0.5]
    assert found(4, "leave_one_out") == pytest.approx([-2 / 3, -2, 2, 2 / 3])
    assert found(4, "length_weighted") == pytest.approx([-0.6, -1.6, 1.4, 0.4])  # 16 / 10
    overlong = Overlong(buffer=2)  # outcomes 0, 0, 3, 1.5
    assert found(4, overlong=overlong) == pytest.approx([-1.125, -1.125, 1.875, 0.375])
    mask[0, 1:3] = False  # what others say in between takes room, too
    assert found(4, overlong=overlong) == pytest.approx([-1.125, -1.125, 1.875, 0.375])
    mask[0, 1:3] = True
    assert found(1, single="score") == [1.0, 0.0, 3.0, 2.0]
    assert found(1) == [0.0, 0.0, 0.0, 0.0]


def test_equal_outcomes_teach_nothing() -> None:
    mask = torch.ones(7, 2, dtype=torch.bool)
    rows = {"response_mask": mask, "scores": torch.full((7, 2), 0.15)}
    for baseline in ("mean", "leave_one_out", "length_weighted"):
        for eps in (1e-9, 0.0):
            found = GroupEstimator(group_size=7, baseline=baseline, eps=eps)(rows)
            assert torch.equal(found["advantages"], torch.zeros(7, 2))
