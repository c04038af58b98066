from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from rlhf_lightning.functional import (
    CISPOLoss,
    Counts,
    GeometricPolicyLoss,
    OffPolicyCorrection,
    PolicyLoss,
    ReinforceLoss,
    SequencePolicyLoss,
)
from rlhf_lightning.functional.off_policy import Level, Mode
from tests.unit.functional.cases import close, mask_of
from tests.unit.functional.rows import batch_of, gradient, laid_out, tokens
from tests.unit.functional.slow import limited

LOW, HIGH = 0.5, 2.0
SURROGATES = (PolicyLoss, SequencePolicyLoss, GeometricPolicyLoss, CISPOLoss, ReinforceLoss)


def slow_weights(row: list[tuple[float, ...]], level: str, mode: str) -> tuple[list[float], list[float]]:
    """Ratios and weights of one response of (old, rollout) log-probabilities."""
    d = [old - rollout for old, rollout in row]
    ratios = [math.exp(x) for x in (d if level == "token" else [sum(d)] * len(d))]
    if mode == "truncate":
        return ratios, [limited(ratio, LOW, HIGH) for ratio in ratios]
    return ratios, [ratio if LOW <= ratio <= HIGH else 0.0 for ratio in ratios]


def test_against_python(case: str, dtype: torch.dtype) -> None:
    levels: tuple[Level, ...] = ("token", "sequence")
    modes: tuple[Mode, ...] = ("truncate", "mask")
    for level, mode in product(levels, modes):
        compare(level, mode, mask_of(case), dtype)


def compare(level: Level, mode: Mode, mask: torch.Tensor, dtype: torch.dtype) -> None:
    outputs, rows = batch_of(mask, dtype)
    pairs = tokens(mask, rows["log_probs"], rows["rollout_log_probs"])
    found = [slow_weights(row, level, mode) for row in pairs]
    correction = OffPolicyCorrection(level=level, mode=mode, low=LOW, high=HIGH)
    loss, counts = ReinforceLoss(correction=correction), Counts.of(mask)
    count = max(int(mask.sum()), 1)
    weights = laid_out(mask, [w for _, w in found])
    value, metrics = loss(outputs, rows, counts)
    plain = tokens(mask, outputs["log_probs"], rows["advantages"], weights)
    close(value, sum(-n * a * w for row in plain for n, a, w in row) / count)
    close(metrics["actor/correction_weight"], sum(sum(w) for _, w in found) / count)
    close(metrics["actor/mismatch_ratio"], sum(sum(r) for r, _ in found) / count)


def test_by_hand() -> None:
    old, mask = torch.tensor([[4.0, 0.5, 1.0, 9.0]]).log(), torch.tensor([[True, True, True, False]])

    def weights(level: Level, mode: Mode) -> torch.Tensor:
        correction = OffPolicyCorrection(level=level, mode=mode, low=0.4, high=1.5)
        return correction(old, torch.zeros(1, 4), mask, num_tokens=3)[0][:, :3]

    close(weights("token", "truncate"), [[1.5, 0.5, 1.0]])
    close(weights("token", "mask"), [[0.0, 0.5, 1.0]])
    close(weights("sequence", "truncate"), [[1.5, 1.5, 1.5]])  # 4 * 0.5 * 1 = 2
    close(weights("sequence", "mask"), [[0.0, 0.0, 0.0]])


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_scales_the_gradient_and_has_none(surrogate: type[PolicyLoss]) -> None:
    """The gradient of each token is that without weights, times its weight."""
    mask = mask_of("gap_inside")
    outputs, rows = batch_of(mask)
    rows["advantages"] = torch.where(mask, 0.5, rows["advantages"])
    weights = rows["log_probs"] - rows["rollout_log_probs"]
    if surrogate is GeometricPolicyLoss:  # one number a response: its weights average
        rows["rollout_log_probs"] = rows["log_probs"] - 0.3
        weights = torch.full(mask.shape, 0.3)
    corrected = surrogate(correction=OffPolicyCorrection(high=1e9))
    expected = torch.where(mask, gradient(surrogate(), outputs, rows) * weights.exp(), 0.0)
    close(gradient(corrected, outputs, rows), expected)
    leaf = rows["rollout_log_probs"].clone().requires_grad_()
    value, _ = corrected(outputs, rows | {"rollout_log_probs": leaf}, Counts.of(mask))
    assert not value.requires_grad


def test_on_policy_changes_nothing() -> None:
    mask = mask_of("masked_row")
    outputs, rows = batch_of(mask)
    rows["rollout_log_probs"] = rows["log_probs"]
    value, metrics = PolicyLoss(correction=OffPolicyCorrection())(outputs, rows, Counts.of(mask))
    assert value == PolicyLoss()(outputs, rows, Counts.of(mask))[0]
    close(metrics["actor/mismatch_ratio"], 1.0)


def test_entropy_and_kl_are_not_weighted() -> None:
    mask = mask_of("right_padding")
    outputs, rows = batch_of(mask)
    rows["advantages"] = torch.where(mask, 0.0, rows["advantages"])
    extra = {"kl_coef": 0.1, "entropy_coef": 0.01}
    plain, _ = PolicyLoss(**extra)(outputs, rows, Counts.of(mask))  # type: ignore[arg-type]
    correction = OffPolicyCorrection(level="sequence")
    value, _ = PolicyLoss(**extra, correction=correction)(outputs, rows, Counts.of(mask))  # type: ignore[arg-type]
    assert value == plain


def test_huge_ratios_stay_finite() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    correction = OffPolicyCorrection(level="sequence", high=1e30)
    weights, _ = correction(torch.full((1, 3), 0.0), torch.full((1, 3), -500.0), mask, num_tokens=3)
    torch.testing.assert_close(weights, torch.full((1, 3), math.exp(20)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"level": "row"}, "level='row'.*Try 'token'"),
        ({"mode": "drop"}, "mode='drop'.*Try 'truncate'"),
        ({"low": 3.0}, r"low=3\.0, high=2\.0.*Try 0\.0 and 2\.0"),
        ({"low": -1.0}, r"low=-1\.0"),
        ({"high": 0.0}, r"high=0\.0"),
    ],
)
def test_refusals(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffPolicyCorrection(**fields)  # type: ignore[arg-type]
