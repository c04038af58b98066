from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import LagrangianEstimator, gae
from tests.unit.functional import slow
from tests.unit.functional.cases import close, mask_of
from tests.unit.functional.estimators import columns_of
from tests.unit.functional.rows import laid_out
from tests.unit.functional.slow import limited

BETA, L, CLIP = 0.3, 2.0, 0.9


def test_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    for cost_critic in (True, False):
        compare(mask, columns_of(mask, dtype), cost_critic)


def compare(mask: Tensor, columns: dict[str, Tensor], cost_critic: bool) -> None:
    names = ("scores", "costs", "log_probs", "ref_log_probs", "values", "cost_values")
    rows = zip(*(slow.rows_of(columns[name], mask) for name in names), strict=True)
    wanted: dict[str, slow.Rows] = {name: [] for name in ("A", "R", "C")}
    for scores, costs, new, ref, values, cost_values in rows:
        kls = [p - q for p, q in zip(new, ref, strict=True)]
        r = [limited(s - BETA * d, -CLIP, CLIP) for s, d in zip(scores, kls, strict=True)]
        c = [limited(s + BETA * d, -CLIP, CLIP) for s, d in zip(costs, kls, strict=True)]
        a_r = slow.gae(r, values, gamma=0.9, lam=0.8)
        a_c = slow.gae(c, cost_values, gamma=0.9, lam=0.8) if cost_critic else slow.returns(c, 0.9)
        wanted["A"].append([(x - L * y) / (1 + L) for x, y in zip(a_r, a_c, strict=True)])
        wanted["R"].append([x + v for x, v in zip(a_r, values, strict=True)])
        wanted["C"].append([x + v * cost_critic for x, v in zip(a_c, cost_values, strict=True)])
    found = LagrangianEstimator(
        multiplier=L, cost_critic=cost_critic, gamma=0.9, lam=0.8, kl_coef=BETA, clip=CLIP
    )(columns)
    close(found["advantages"], laid_out(mask, wanted["A"]))
    close(found["returns"], laid_out(mask, wanted["R"]))
    close(found["cost_returns"], laid_out(mask, wanted["C"]))
    close(found["row_scores"], [sum(row) for row in slow.rows_of(columns["scores"], mask)])


def test_by_hand() -> None:
    rows = {
        "response_mask": torch.tensor([[True, True]]),
        "scores": torch.tensor([[0.0, 90.0]]),
        "costs": torch.tensor([[0.0, 4.0]]),
        "log_probs": torch.tensor([[-1.0, -1.0]]),
        "ref_log_probs": torch.tensor([[-2.0, -1.0]]),  # d = 1, 0
        "values": torch.tensor([[10.0, 20.0]]),
        "cost_values": torch.tensor([[1.0, 3.0]]),
    }
    found = LagrangianEstimator(multiplier=3.0, lam=1.0, kl_coef=0.5)(rows)
    # rewards -0.5 and 50 (limited) leave 39.5 and 30; costs 0.5 and 4 leave 3.5 and 1
    close(found["advantages"], [[(39.5 - 10.5) / 4, (30.0 - 3.0) / 4]])
    close(found["returns"], [[49.5, 50.0]])
    close(found["cost_returns"], [[4.5, 4.0]])
    close(found["row_kl"], [0.5])
    without = LagrangianEstimator(multiplier=3.0, lam=1.0, kl_coef=0.5, cost_critic=False)
    assert "cost_values" not in without.columns
    # without a critic all that is to come, 4.5 and 4
    close(without(rows)["advantages"], [[(39.5 - 13.5) / 4, (30.0 - 12.0) / 4]])


def test_defaults_are_those_of_the_authors() -> None:
    estimator = LagrangianEstimator()
    assert (estimator.kl_coef, estimator.gamma, estimator.lam, estimator.clip) == (0.01, 1.0, 0.95, 50.0)
    assert not estimator.whiten


def test_no_multiplier_is_the_reward_alone() -> None:
    mask = mask_of("gap_inside")
    columns = columns_of(mask)
    found = LagrangianEstimator(multiplier=0.0, kl_coef=0.0)(columns)
    plain, returns = gae(columns["scores"], columns["values"], mask, gamma=1.0, lam=0.95)
    assert torch.equal(found["advantages"], plain)
    assert torch.equal(found["returns"], returns)


def test_whitening_is_of_what_reward_and_cost_make_together() -> None:
    mask = mask_of("gap_inside")
    columns = columns_of(mask)
    plain, found = (LagrangianEstimator(multiplier=L, whiten=whiten)(columns) for whiten in (False, True))
    close(found.pop("advantages"), laid_out(mask, slow.whitened(slow.rows_of(plain["advantages"], mask))))
    assert all(torch.equal(column, plain[name]) for name, column in found.items())


@pytest.mark.parametrize("cost_critic", [True, False])
def test_gap_is_handed_on(cost_critic: bool) -> None:
    zero = torch.zeros(1, 3)
    names = ("log_probs", "ref_log_probs", "values", "cost_values")
    rows = dict.fromkeys(names, zero) | {"response_mask": torch.tensor([[True, False, True]])}
    rows |= {"scores": torch.tensor([[0.0, 0.0, 4.0]]), "costs": torch.tensor([[0.0, 0.0, 1.0]])}
    for gap, factor in (("carry", 0.5), ("zero", 0.25)):
        estimator = LagrangianEstimator(gamma=0.5, lam=1.0, gap=gap, cost_critic=cost_critic)  # type: ignore[arg-type]
        found = estimator(rows)
        close(found["advantages"], [[1.5 * factor, 0.0, 1.5]])  # of 4 less 1, halved
