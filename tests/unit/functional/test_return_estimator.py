from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import product

import torch

from rlhf_lightning.functional import ReturnEstimator, Single
from rlhf_lightning.functional.returns import ReturnGap
from tests.unit.functional import slow
from tests.unit.functional.cases import close, mask_of
from tests.unit.functional.estimators import columns_of
from tests.unit.functional.rows import laid_out
from tests.unit.functional.slow import Rows

BETA = 0.3


def compared(outcomes: list[float], lengths: list[int], size: int, single: str) -> list[float]:
    """Outcomes less the mean of their group, which a fully masked row is not part of."""
    if size == 1:
        return outcomes
    out = []
    for i, own in enumerate(outcomes):
        start = i // size * size
        same = [j for j in range(start, start + size) if lengths[j]]
        lone = own if single == "score" else 0.0
        out.append(lone if len(same) < 2 else own - statistics.fmean(outcomes[j] for j in same))
    return out


def slow_estimates(scores: Rows, kls: Rows, estimator: ReturnEstimator) -> Rows:
    lengths, size, single = [len(row) for row in scores], estimator.group_size, estimator.single
    if estimator.credit == "outcome":
        totals = [sum(s) - BETA * sum(k) for s, k in zip(scores, kls, strict=True)]
        return [[x] * n for x, n in zip(compared(totals, lengths, size, single), lengths, strict=True)]
    outcomes = [sum(row) for row in scores]
    shifts = [c - o for c, o in zip(compared(outcomes, lengths, size, single), outcomes, strict=True)]
    rewards = [[s - BETA * k for s, k in zip(a, b, strict=True)] for a, b in zip(scores, kls, strict=True)]
    for row, shift in zip(rewards, shifts, strict=True):
        row[-1:] = [x + shift for x in row[-1:]]
    return [slow.returns(row, estimator.gamma) for row in rewards]


def test_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    columns = columns_of(mask, dtype)
    names = ("scores", "log_probs", "ref_log_probs")
    scores, new, ref = (slow.rows_of(columns[name], mask) for name in names)
    kls = [[(p - q) ** 2 / 2 for p, q in zip(a, b, strict=True)] for a, b in zip(new, ref, strict=True)]
    singles: tuple[Single, ...] = ("zero", "score")
    plain = ReturnEstimator(gamma=0.9, kl_coef=BETA, kl_estimator="k2")
    whole = replace(plain, gamma=1.0, credit="outcome", unbiased=False)
    for form, size, single in product((plain, whole), (1, 2), singles):
        estimator = replace(form, group_size=size, single=single)
        found = estimator(columns)
        expected = slow.whitened(slow_estimates(scores, kls, estimator), unbiased=estimator.unbiased)
        close(found["advantages"], laid_out(mask, expected))
        close(found["kl"], laid_out(mask, kls))
        close(found["row_scores"], [sum(row) for row in scores])


def test_by_hand() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    rows = {"response_mask": mask, "scores": torch.tensor([[1.0, 2.0], [-1.0, 9.0]])}
    close(ReturnEstimator(gamma=0.5, whiten=False)(rows)["advantages"], [[2.0, 2.0], [-1.0, 0.0]])
    # outcomes 3 and -1, mean 1: the last rewards are 2 - 1 and -1 - 1
    base = ReturnEstimator(gamma=0.5, whiten=False, group_size=2)
    close(base(rows)["advantages"], [[1.5, 1.0], [-2.0, 0.0]])
    whole = ReturnEstimator(credit="outcome", whiten=False, group_size=2)
    close(whole(rows)["advantages"], [[2.0, 2.0], [-2.0, 0.0]])
    scale = 1 / math.sqrt(16 / 3)  # 2, 2 and -2 about 2 / 3
    expected = [[4 / 3 * scale, 4 / 3 * scale], [-8 / 3 * scale, 0.0]]
    close(ReturnEstimator(credit="outcome", group_size=2)(rows)["advantages"], expected)


def test_a_gap_is_what_it_is_said_to_be() -> None:
    rows = {"response_mask": torch.tensor([[True, False, True]]), "scores": torch.tensor([[0.0, 0.0, 1.0]])}
    expected: dict[ReturnGap, float] = {"carry": 0.5, "zero": 0.25, "forget": 0.0}
    for gap, first in expected.items():
        found = ReturnEstimator(gamma=0.5, gap=gap, whiten=False)(rows)
        close(found["advantages"], [[first, 0.0, 1.0]])
