from __future__ import annotations

import math
import statistics
from itertools import chain

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import GAEEstimator, explained_variance, mean_std, merged
from tests.unit.functional import slow
from tests.unit.functional.cases import close, mask_of, valid
from tests.unit.functional.estimators import columns_of
from tests.unit.functional.rows import laid_out
from tests.unit.functional.slow import limited

FULL = GAEEstimator(
    gamma=0.9, lam=0.8, bootstrap=True, unbiased=False, kl_coef=0.2, kl_estimator="k3", score_clip=0.9,
    score_scale=1.5, value_mean=2.0, value_std=0.5,
)  # fmt: skip


def slow_scores(row: list[float]) -> list[float]:
    return [limited(x * 1.5, -0.9, 0.9) for x in row]


def test_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    columns = columns_of(mask, dtype)
    found = FULL(columns)
    names = ("scores", "log_probs", "ref_log_probs", "values")
    rows = list(zip(*(slow.rows_of(columns[name], mask) for name in names), strict=True))
    kls = [[slow.k3(p - q) for p, q in zip(new, ref, strict=True)] for _, new, ref, _ in rows]
    rewards, advantages, returns = [], [], []
    for b, (scores, _, _, units) in enumerate(rows):
        values = [v * 0.5 + 2.0 for v in units]
        rewards.append([s - 0.2 * k for s, k in zip(slow_scores(scores), kls[b], strict=True)])
        cut = bool(values) and valid(mask, b)[-1] == mask.shape[1] - 1
        tail = values[-1] if cut else 0.0
        advantages.append(slow.gae(rewards[b], values, gamma=0.9, lam=0.8, tail=tail))
        returns.append([a + v for a, v in zip(advantages[b], values, strict=True)])
    close(found["kl"], laid_out(mask, kls))
    close(found["row_kl"], [sum(k) / max(len(k), 1) for k in kls])
    close(found["rewards"], laid_out(mask, rewards))
    close(found["advantages"], laid_out(mask, slow.whitened(advantages, unbiased=False)))
    close(found["returns"], laid_out(mask, [[(x - 2.0) / 0.5 for x in row] for row in returns]))
    close(found["row_scores"], [sum(scores) for scores, *_ in rows])
    close(found["row_returns"].float(), [sum(row) for row in returns])
    close(found["row_squares"].float(), [sum(x * x for x in row) for row in returns])
    flat, errors = chain.from_iterable(returns), chain.from_iterable(advantages)
    assert explained_variance(found) == pytest.approx(
        slow_explained(list(flat), list(errors)), rel=1e-4, abs=1e-4
    )


def slow_explained(returns: list[float], errors: list[float]) -> float:
    """By the raw advantages, which are what the values were wrong by."""
    spread = statistics.pvariance(returns) if len(returns) > 1 else 0.0
    return 1 - statistics.pvariance(errors) / spread if spread else 0.0


@pytest.mark.parametrize(
    ("values", "scores", "share"),
    [
        ([8.0, 7.0, 6.0], [1.0, 1.0, 1.0], 1.0),  # a constant error does not count
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], 0.0),
        ([-3.0, -2.0, -1.0], [1.0, 1.0, 1.0], -3.0),
        ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], -3.0),
        ([1.0, 2.0, 0.3], [0.0, 0.0, 0.1], 0.0),  # returns that do not vary, but for their rounding
    ],
)
def test_explained_variance(values: list[float], scores: list[float], share: float) -> None:
    zero = [0.0] * 3
    rows = one_row(scores=scores, log_probs=zero, ref_log_probs=zero, values=values)
    found = GAEEstimator(lam=1.0, kl_coef=0.0)(rows)
    assert explained_variance(found) == pytest.approx(share, abs=1e-6)


def one_row(**columns: list[float]) -> dict[str, Tensor]:
    found = {name: torch.tensor([numbers]) for name, numbers in columns.items()}
    return found | {"response_mask": torch.ones(1, len(found["scores"][0]), dtype=torch.bool)}


def test_by_hand() -> None:
    rows = one_row(scores=[0.0, 1.0], log_probs=[-1.0, -2.0], ref_log_probs=[-1.5, -1.0], values=[0.5, 0.25])
    found = GAEEstimator(lam=0.5, kl_coef=0.1, whiten=False)(rows)
    close(found["kl"], [[0.5, -1.0]])
    close(found["row_kl"], [-0.25])
    close(found["rewards"], [[-0.05, 1.1]])
    close(found["advantages"], [[-0.3 + 0.5 * 0.85, 0.85]])  # delta = -0.05 + 0.25 - 0.5 and 1.1 - 0.25
    close(found["returns"], [[0.625, 1.1]])
    whitened = GAEEstimator(lam=0.5, kl_coef=0.1)(rows)
    close(whitened["advantages"], [[-math.sqrt(0.5), math.sqrt(0.5)]])
    close(whitened["returns"], [[0.625, 1.1]])  # as they were before


def test_scores_are_shifted_then_scaled_then_limited() -> None:
    zero = [0.0, 0.0]
    rows = one_row(scores=[0.5, 3.0], log_probs=zero, ref_log_probs=zero, values=zero)

    def rewards(**fields: float) -> Tensor:
        found = GAEEstimator(**fields)(rows)  # type: ignore[arg-type]
        close(found["row_scores"], [3.5])
        return found["rewards"]

    close(rewards(score_scale=0.5), [[0.25, 1.5]])
    close(rewards(score_scale=0.5, score_clip=0.75), [[0.25, 0.75]])
    close(rewards(score_clip=2.0), [[0.5, 2.0]])


def test_units_of_values_change_nothing_but_the_returns() -> None:
    """A critic in units of 4 around 10 says the same as one in plain units."""
    mask = mask_of("gap_inside")
    columns = columns_of(mask)
    units = columns | {"values": (columns["values"] - 10) / 4}
    plain, found = (
        estimator(rows)
        for estimator, rows in (
            (GAEEstimator(), columns),
            (GAEEstimator(value_mean=10.0, value_std=4.0), units),
        )
    )
    torch.testing.assert_close(found["advantages"], plain["advantages"], rtol=1e-5, atol=1e-5)
    expected = torch.where(mask, (plain["returns"] - 10) / 4, 0.0)
    torch.testing.assert_close(found["returns"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["row_returns"], plain["row_returns"], rtol=1e-5, atol=1e-5)


def test_row_sums_give_the_moments_of_the_returns() -> None:
    mask = mask_of("gap_inside")
    found = GAEEstimator()(columns_of(mask))
    state = merged(
        torch.zeros(3, dtype=torch.float64),
        *(found[name].sum() for name in ("row_returns", "row_squares", "row_tokens")),
    )
    every = found["returns"][mask].double()
    assert mean_std(state) == pytest.approx((float(every.mean()), float(every.std(unbiased=False))))


@pytest.mark.parametrize("bootstrap", [False, True])
def test_responses_that_were_cut_off_go_on(bootstrap: bool) -> None:
    mask = torch.tensor([[True, True], [True, True], [True, False]])  # the second ends with its last token
    zero = torch.zeros(3, 2)
    rows = {"response_mask": mask, "scores": zero, "log_probs": zero, "ref_log_probs": zero}
    rows |= {"values": torch.ones(3, 2), "truncated_mask": mask & torch.tensor([[True], [False], [False]])}
    found = GAEEstimator(gamma=0.5, lam=0.0, whiten=False, bootstrap=bootstrap)(rows)
    last = -0.5 if bootstrap else -1.0
    close(found["advantages"], [[-0.5, last], [-0.5, -1.0], [-1.0, 0.0]])
    close(found["rewards"], zero)
