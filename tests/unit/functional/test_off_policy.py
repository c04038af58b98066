from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import (
    CISPOLoss,
    Counts,
    GeometricPolicyLoss,
    OffPolicyCorrection,
    PolicyLoss,
    ReinforceLoss,
    SAPOLoss,
    SequencePolicyLoss,
)
from rlhf_lightning.functional.off_policy import Level, Mode
from tests.unit.functional.cases import close, mask_of
from tests.unit.functional.rows import batch_of, gradient

SURROGATES = (PolicyLoss, SequencePolicyLoss, GeometricPolicyLoss, CISPOLoss, ReinforceLoss, SAPOLoss)


def test_by_hand() -> None:
    old, mask = torch.tensor([[4.0, 0.5, 1.0, 9.0]]).log(), torch.tensor([[True, True, True, False]])

    def weights(level: Level, mode: Mode) -> torch.Tensor:
        correction = OffPolicyCorrection(level=level, mode=mode, low=0.4, high=1.5)
        return correction(old, torch.zeros(1, 4), mask, num_tokens=3)[0][:, :3]

    _, metrics = OffPolicyCorrection(high=1.5)(old, torch.zeros(1, 4), mask, num_tokens=3)
    close(metrics["actor/mismatch_ratio"], (4 + 0.5 + 1) / 3)
    close(metrics["actor/correction_weight"], (1.5 + 0.5 + 1) / 3)
    close(weights("token", "truncate"), [[1.5, 0.5, 1.0]])
    close(weights("token", "mask"), [[0.0, 0.5, 1.0]])
    close(weights("sequence", "truncate"), [[1.5, 1.5, 1.5]])  # 4 * 0.5 * 1 = 2
    close(weights("sequence", "mask"), [[0.0, 0.0, 0.0]])
    within = OffPolicyCorrection(level="sequence", high=3.0)
    close(within(old, torch.zeros(1, 4), mask, num_tokens=3)[0], [[2.0, 2.0, 2.0, 2.0]])


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
