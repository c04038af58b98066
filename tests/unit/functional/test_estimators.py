"""What all estimators have in common: columns, types, and ranks that give what the controller gives."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.functional import (
    Add,
    Estimator,
    GAEEstimator,
    GreedyEstimator,
    GroupEstimator,
    LagrangianEstimator,
    Overlong,
    ReturnEstimator,
    alone,
    check_estimator,
    run_estimator,
)
from tests.unit import spmd
from tests.unit.functional.cases import MASKS, mask_of
from tests.unit.functional.estimators import columns_of

ESTIMATORS: dict[str, Estimator] = {
    "gae": GAEEstimator(kl_coef=0.1),
    "gae_everything": GAEEstimator(
        gamma=0.9, gap="zero", bootstrap=True, unbiased=False, kl_coef=0.1, kl_estimator="k3", score_clip=0.5,
        score_scale=2.0, value_mean=3.0, value_std=2.0,
    ),
    "group": GroupEstimator(group_size=2),
    "group_everything": GroupEstimator(
        group_size=4, baseline="length_weighted", single="score", overlong=Overlong(buffer=1), kl_coef=0.1
    ),
    "return": ReturnEstimator(gamma=0.9, kl_coef=0.1),
    "return_baseline": ReturnEstimator(group_size=2),
    "return_outcome": ReturnEstimator(group_size=4, credit="outcome", single="score", kl_coef=0.1),
    "greedy": GreedyEstimator(kl_coef=0.1, gamma=0.9, clip=0.5),
    "greedy_verl": GreedyEstimator(form="verl"),
    "lagrangian": LagrangianEstimator(),
    "lagrangian_whitened": LagrangianEstimator(cost_critic=False, whiten=True, multiplier=2.0, clip=None),
}  # fmt: skip
SUMS = ("row_returns", "row_squares", "row_errors", "row_error_squares")
ROWS = {"row_scores", "row_tokens", "row_ends", "row_kl", *SUMS}
TYPES = {"row_tokens": torch.int64, "row_ends": torch.int64, **dict.fromkeys(SUMS, torch.float64)}


def twice(mask: Tensor) -> Tensor:
    """Eight rows, so that four together still leave two groups."""
    return torch.cat([mask, mask.flip(0)])


def read(estimator: Estimator, mask: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    columns = columns_of(mask, dtype)
    return {name: columns[name] for name in estimator.columns}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_contract(name: str, dtype: torch.dtype) -> None:
    """It pickles, reads only its columns, makes those that it names, and lets no garbage through."""
    estimator = ESTIMATORS[name]
    assert pickle.loads(pickle.dumps(estimator)) == estimator  # noqa: S301
    for case in MASKS:
        mask = twice(mask_of(case))
        found = estimator(read(estimator, mask, dtype))
        assert set(found) == set(estimator.returns)
        assert {"advantages", "row_scores", "row_tokens"} <= set(found)
        for column, x in found.items():
            assert x.shape == (mask.shape[:1] if column in ROWS else mask.shape), column
            assert x.dtype == TYPES.get(column, torch.float32), column
            assert torch.isfinite(x).all(), column
            empty = ~mask.any(dim=1) if column in ROWS else ~mask
            assert (x[empty] == 0).all(), column
        nobody = mask[:0]
        assert {len(x) for x in estimator(read(estimator, nobody, dtype)).values()} == {0}


CUTS = ((0, 4, 8), (0, 8, 8))
"""Half of the rows each, and one without rows."""


def on_a_rank(group: dist.ProcessGroup) -> dict[tuple[int, str, str], dict[str, Tensor]]:
    def add(x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    found = {}
    for number, case, name in product(range(len(CUTS)), MASKS, ESTIMATORS):
        mine = slice(*CUTS[number][group.rank() :][:2])
        rows = read(ESTIMATORS[name], twice(mask_of(case)))
        given = {key: x[mine] for key, x in rows.items()}
        found[number, case, name] = run_estimator(ESTIMATORS[name], given, add)
    return found


def test_ranks_give_what_the_controller_gives() -> None:
    ranks = spmd.run(2, on_a_rank)
    for number, case, name in product(range(len(CUTS)), MASKS, ESTIMATORS):
        whole = ESTIMATORS[name](read(ESTIMATORS[name], twice(mask_of(case))))
        for column, x in whole.items():
            joined = torch.cat([rank[number, case, name][column] for rank in ranks])
            torch.testing.assert_close(joined, x, rtol=1e-6, atol=1e-6)


def test_rows_together() -> None:
    assert GAEEstimator().rows_together == 1
    assert GroupEstimator(group_size=4).rows_together == 4
    assert ReturnEstimator(group_size=2).rows_together == 2


def test_a_penalty_of_nothing_reads_no_reference() -> None:
    for estimator in (GroupEstimator(group_size=2), ReturnEstimator(), GreedyEstimator()):
        assert "ref_log_probs" not in estimator.columns
        assert "kl" not in estimator.returns


def test_a_critic_comes_with_the_divergence_whatever_its_weight() -> None:
    for estimator in (GAEEstimator(kl_coef=0.0), LagrangianEstimator(kl_coef=0.0)):
        assert {"log_probs", "ref_log_probs"} < set(estimator.columns)
        assert {"kl", "row_kl"} < set(estimator.returns)


@pytest.mark.parametrize(
    ("estimator", "fields", "message"),
    [
        (GAEEstimator, {"gamma": 1.1}, r"GAEEstimator\(gamma=1\.1\): must lie.*Try gamma=1\.0"),
        (GAEEstimator, {"lam": -0.1}, r"lam=-0\.1"),
        (GAEEstimator, {"score_clip": 0.0}, r"score_clip=0\.0.*Try 5\.0 or None"),
        (GAEEstimator, {"value_std": 0.0}, r"value_std=0\.0"),
        (GroupEstimator, {"group_size": 0}, "group_size=0.*Try 8"),
        (GroupEstimator, {"group_size": 2, "eps": -1.0}, r"eps=-1\.0"),
        (ReturnEstimator, {"group_size": 0}, "group_size=0.*Try 8"),
        (ReturnEstimator, {"gamma": 2.0}, r"ReturnEstimator\(gamma=2\.0\): .* Try gamma=1\.0\.$"),
        (GreedyEstimator, {"gamma": -1.0}, r"GreedyEstimator\(gamma=-1\.0\): .* Try gamma=1\.0\.$"),
        (ReturnEstimator, {"credit": "outcome", "gamma": 0.9}, r"credit='outcome', gamma=0\.9.*no discount"),
        (GreedyEstimator, {"form": "verl", "clip": 5.0}, "form='verl' has none"),
        (GreedyEstimator, {"clip": -5.0}, "must be above 0"),
        (LagrangianEstimator, {"multiplier": -1.0}, r"multiplier=-1\.0"),
        (LagrangianEstimator, {"clip": 0.0}, r"clip=0\.0.*Try 50\.0 or None"),
        (GreedyEstimator, {"clip": 0.0}, r"form='official', clip=0\.0\): a limit must be above 0"),
        (LagrangianEstimator, {"gamma": 1.1}, r"LagrangianEstimator\(gamma=1\.1\): must lie"),
        (LagrangianEstimator, {"lam": 1.1}, r"LagrangianEstimator\(lam=1\.1\): must lie"),
    ],
)
def test_refusals(estimator: type[Estimator], fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimator(**fields)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_word_is_no_number(name: str) -> None:
    with pytest.raises(ValueError, match=r"Estimator\(kl_coef='0\.1'\): has to be of type float"):
        replace(cast(Any, ESTIMATORS[name]), kl_coef="0.1")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_leaves_the_reference_is_not_rewarded(name: str) -> None:
    with pytest.raises(ValueError, match=r"Estimator\(kl_coef=-0\.1\): a penalty is not negative\. Try 0\."):
        replace(cast(Any, ESTIMATORS[name]), kl_coef=-0.1)


@dataclass(frozen=True, kw_only=True)
class Mine(Estimator):
    """A user's own, with what is wrong in it."""

    reads: str = "scores"
    answer: Any = None

    @property
    def columns(self) -> tuple[str, ...]:
        return ("scores",)

    @property
    def returns(self) -> tuple[str, ...]:
        return ("advantages",)

    def __call__(self, rows: Mapping[str, Tensor], add: Add = alone) -> dict[str, Tensor]:
        return {"advantages": rows[self.reads]} if self.answer is None else self.answer


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"reads": "values"},
            r"^Mine reads 'values', and is given rows \['scores'\]\. Name .* its `columns`\.$",
        ),
        ({"reads": "entropy"}, r"^Mine reads 'entropy', .* Name the column in its `columns`\.$"),
        ({"answer": torch.ones(3, 2)}, r"^Mine returned a Tensor: an estimator returns columns by name\."),
        ({"answer": {"adv": torch.ones(3)}}, r"^Mine returned \['adv'\], and its `returns` names \['advan"),
        ({"answer": {"advantages": torch.ones(())}}, r"^Mine: 'advantages' is \[\]\. Make it a tensor"),
        ({"answer": {"advantages": torch.ones(2)}}, r"^Mine: 'advantages' is \[2\]\. .* of the 3 rows"),
        ({"answer": {"advantages": [1.0] * 3}}, "^Mine: 'advantages' is list"),
    ],
)
def test_mistakes_in_an_own_one_are_explained(wrong: dict[str, object], says: str) -> None:
    rows = {"scores": torch.zeros(3, 2)}
    assert run_estimator(Mine(), rows)["advantages"] is rows["scores"]
    with pytest.raises(ValueError, match=says):
        run_estimator(replace(Mine(), **cast(Any, wrong)), rows)


def test_what_is_no_estimator() -> None:
    check_estimator(Mine())
    with pytest.raises(TypeError, match=r"^Mine is a class\. Give one of it, Mine\(\)\.$"):
        check_estimator(Mine)
    with pytest.raises(TypeError, match=r"^alone is not an estimator\. Derive"):
        check_estimator(alone)
    with pytest.raises(TypeError, match=r"^dict is not an estimator\. Derive"):
        check_estimator(dict)


class Spelt(Mine):
    """One that names its column as a text."""

    columns = "scores"  # type: ignore[assignment]


def test_a_column_alone_is_no_list_of_columns() -> None:
    with pytest.raises(ValueError, match=r"^Spelt\.columns='scores': .* Write \('scores',\), with the comma"):
        check_estimator(Spelt())


@dataclass(frozen=True)
class Careless(ReturnEstimator):
    """An estimator of the user's own that divides by 0 in a row whose score is 0."""

    def __call__(self, rows: Mapping[str, Tensor], add: Add = alone) -> dict[str, Tensor]:
        found = super().__call__(rows, add)
        bad = torch.zeros(len(found["advantages"]))
        bad[2] = torch.nan
        return found | {"advantages": found["advantages"] + bad[:, None]}


def test_advantages_that_are_no_numbers_are_refused() -> None:
    """Otherwise every step is skipped, and the reason is not said."""
    estimator = Careless()
    rows = read(estimator, twice(mask_of("right_padding")))
    assert run_estimator(ReturnEstimator(), rows).keys() == set(ReturnEstimator().returns)
    with pytest.raises(ValueError, match=r"^Careless: row 2 of its rows has nan in 'advantages'"):
        run_estimator(estimator, rows)
