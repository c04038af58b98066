from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import (
    Aggregation,
    Counts,
    Loss,
    PairLoss,
    PolicyLoss,
    ValueLoss,
    aggregate,
    run_loss,
)
from tests.unit.engines import tiny
from tests.unit.functional.cases import close, mask_of, noise, valid

MODES: tuple[Aggregation, ...] = (
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
)  # fmt: skip
HORIZON = 8
Returned: TypeAlias = tuple[Tensor, dict[str, Tensor]]


def slow(x: Tensor, mask: Tensor, mode: str) -> float:
    rows = [[float(x[b, t]) for t in valid(mask, b)] for b in range(len(mask))]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    each = [sum(row) / len(row) if mode == "seq-mean-token-mean" else sum(row) for row in rows]
    return sum(each) / len(rows) / (HORIZON if mode.endswith("norm") else 1)


def test_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    counts = Counts.of(mask)
    assert counts == Counts(tokens=4, sequences=2, groups=2)
    close(aggregate(x, mask, "token-mean", counts), 11 / 4)
    close(aggregate(x, mask, "seq-mean-token-sum", counts), 11 / 2)
    close(aggregate(x, mask, "seq-mean-token-mean", counts), 7 / 2)
    close(aggregate(x, mask, "seq-mean-token-sum-norm", counts, horizon=10), 11 / 20)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_add_up(mode: Aggregation, size: int, case: str) -> None:
    mask = mask_of(case)
    x = noise(mask, 0)
    slices = [slice(start, start + size) for start in range(0, len(mask), size)]
    counts = sum((Counts.of(mask[part]) for part in slices), Counts(0, 0, 0))
    assert counts == Counts.of(mask)
    parts = [aggregate(x[part], mask[part], mode, counts, horizon=HORIZON) for part in slices]
    close(torch.stack(parts).sum(), slow(x, mask, mode))


def test_a_rank_without_rows_gives_zero_with_a_gradient() -> None:
    x, mask = torch.zeros(0, 3, requires_grad=True), torch.zeros(0, 3, dtype=torch.bool)
    for mode in MODES:
        part = aggregate(x, mask, mode, Counts(tokens=7, sequences=2, groups=2), horizon=HORIZON)
        torch.autograd.backward(part)  # collectives in the backward pass need every rank to come
        assert part == 0


def test_refusals() -> None:
    x, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"aggregation='mean': unknown mode\. Try one of token-mean"):
        aggregate(x, mask, "mean", Counts(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"horizon=0.*Set horizon to sampling\.max_new_tokens"):
        aggregate(x, mask, "seq-mean-token-sum-norm", Counts(1, 1, 1))


@dataclass(frozen=True, kw_only=True)
class Returning(Loss):
    """Returns what a function makes of the log_probs that learn."""

    made: Callable[[Tensor], object]

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts) -> Returned:
        return cast("Returned", self.made(outputs["log_probs"]))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda x: x.sum(), "returned a Tensor: a loss returns a scalar and metrics by name"),
        (lambda x: None, "returned a NoneType"),
        (lambda x: (x.sum(), {}, {}), "returned a tuple"),
        (lambda x: (x, {}), r"the loss has the shape \[2, 3\], and has to be one number"),
        (lambda x: (x.sum(), {"kl": x}), r"the metric 'kl' has the shape \[2, 3\]"),
        (lambda x: (x.sum(), {"kl": 1.0}), "the metric 'kl' is a float. Make it a tensor"),
        (
            lambda x: (x.sum().detach(), {}),
            "the loss does not depend on outputs, so nothing would be learned",
        ),
    ],
)
def test_what_a_loss_returns(made: Callable[[Tensor], object], told: str) -> None:
    outputs, counts = {"log_probs": torch.zeros(2, 3, requires_grad=True)}, Counts(6, 2, 2)
    rows = {"response_mask": torch.ones(2, 3, dtype=torch.bool)}
    with pytest.raises(ValueError, match=f"^Returning:? {told}"):
        run_loss(Returning(made=made), outputs, rows, counts)


@pytest.mark.parametrize("num_rows", [0, 2])
def test_a_loss_may_be_a_constant_where_no_token_is_valid(num_rows: int) -> None:
    x, mask = torch.zeros(num_rows, 3, requires_grad=True), torch.zeros(num_rows, 3, dtype=torch.bool)
    zero = Returning(made=lambda _: (torch.zeros(()), {}))
    value, _ = run_loss(zero, {"log_probs": x}, {"response_mask": mask}, Counts(6, 2, 2))
    torch.autograd.backward(value)  # collectives in the backward pass need every rank to come
    assert value == 0
    assert x.grad is not None
    assert not x.grad.any()


class InPairs(Returning, PairLoss):
    """The same of a loss of pairs."""


def test_a_loss_of_pairs_may_be_a_constant_where_none_is_whole() -> None:
    """An answer without a partner has tokens, and there is nothing to learn from it."""
    x, mask = torch.zeros(2, 3, requires_grad=True), torch.tensor([[True] * 3, [False] * 3])
    kinds: tuple[type[Returning], ...] = (InPairs, Returning)
    pairs, single = (kind(made=lambda _: (torch.zeros(()), {})) for kind in kinds)
    value, _ = run_loss(pairs, {"log_probs": x}, {"response_mask": mask}, Counts(6, 2, 1))
    torch.autograd.backward(value)
    assert x.grad is not None
    for loss, rows in ((pairs, mask | True), (single, mask)):
        with pytest.raises(ValueError, match="the loss does not depend on outputs"):
            run_loss(loss, {"log_probs": x}, {"response_mask": rows}, Counts(6, 2, 1))


@pytest.mark.parametrize(
    ("wanted", "output", "fix"),
    [
        ("entropy", "log_probs", r"Let its `needs_entropy` be True\."),
        ("values", "log_probs", r"Name the column in its `columns`, or read outputs\['log_probs'\]\."),
        ("log_probs", "values", r"Name the column in its `columns`, or read outputs\['values'\]\."),
        ("entropy", "values", r"Name the column in its `columns`, or read outputs\['values'\]\."),
    ],
)
def test_what_a_loss_looks_for_in_vain_is_named(wanted: str, output: str, fix: str) -> None:
    given = {output: torch.ones(2, 3)}
    with pytest.raises(ValueError, match=rf"^Looking reads '{wanted}', and .*\['{output}'\]\. {fix}$"):
        run_loss(tiny.Looking(wanted), given, given, Counts(6, 2, 2))


class Weighted(Loss):
    """Reads the column of the batch that outputs have too, and does not name it."""

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts) -> Returned:
        return (outputs["log_probs"] * rows["log_probs"]).sum(), {}


@pytest.mark.parametrize(
    ("loss", "outputs", "rows", "told"),
    [
        (Weighted(), "log_probs", ["response_mask"], r"Name the column in its `columns`, or read outputs"),
        (
            PolicyLoss(),
            "values",
            ["log_probs"],
            r"Read rows\['log_probs'\], or give the loss to a role whose",
        ),
        (
            ValueLoss(),
            "log_probs",
            ["values", "returns"],
            r"Read rows\['values'\], or give the loss to a role",
        ),
        (Weighted(), "log_probs", ["log_probs"], ""),
    ],
)
def test_a_name_that_stands_on_one_side_alone(loss: Loss, outputs: str, rows: list[str], told: str) -> None:
    x, mask = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    columns = {"response_mask": mask, "advantages": x.detach()} | {name: x.detach() for name in rows}
    if not told:
        assert float(run_loss(loss, {outputs: x}, columns, Counts(6, 2, 2))[0]) == 6
        return
    with pytest.raises(ValueError, match=rf"^{type(loss).__name__} reads '\w+', and is given .* {told}"):
        run_loss(loss, {outputs: x}, columns, Counts(6, 2, 2))


def test_a_loss_is_called_without_gradients_too() -> None:
    loss = Returning(made=lambda x: (x.sum(), {"n": x.sum()}))
    value, metrics = run_loss(loss, {"log_probs": torch.ones(2, 3)}, {}, Counts(6, 2, 2))
    assert (float(value), float(metrics["n"])) == (6.0, 6.0)
