"""What our formulas give on the batches of tests/parity, and how far that is from a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from rlhf_lightning.functional import (
    Estimator,
    Loss,
    OffPolicyCorrection,
    PolicyLoss,
    ReturnEstimator,
    adapted_kl_coef,
    kl_estimate,
    masked_mean,
    overlong_penalty,
)
from tests.parity import cases, references
from tests.parity.cases import Batch
from tests.parity.references import Formula, Found, Outputs

TOLERANCE = {"float32": 1e-6, "bfloat16": 3e-2}
"""Relative, or absolute below 1. In bfloat16 other systems compute in it, eight bits an operation, and we in
float32: found are 2e-7 and 2.3e-2, the latter in whitened advantages."""


def far(formula: Formula, key: str, wanted: Outputs) -> float:
    """Distance from the reference of what a formula makes of the batch `key`, garbage under its mask."""
    return references.farthest(references.outputs(formula(_garbled(key)), cases.named(key)), wanted)


def agrees(
    name: str,
    values: Mapping[str, Outputs],
    formulas: Mapping[str, Formula],
    exceptions: Mapping[tuple[str, str], Formula],
    *,
    may_raise: bool = False,
) -> None:
    """Hold a formula to the reference on every batch, or what stands for it in `exceptions` for that mask.

    Args:
        name: of the formula.
        values: what the other system gave, by batch.
        formulas: ours, by name.
        exceptions: what it does in our terms where it does something else, by name and mask.
        may_raise: leave out batches that the system refused.
    """
    for key, wanted in values.items():
        if may_raise and "raises" in wanted:
            continue
        case, dtype = key.split("/")
        distance = far(exceptions.get((name, case), formulas[name]), key, wanted)
        assert distance <= TOLERANCE[dtype], f"{key}: {distance}"


def adapted_coefs() -> list[float]:
    """The KL coefficient after each of the readings."""
    coef, coefs = 0.2, []
    for current in cases.KL_READINGS:
        coef = adapted_kl_coef(coef, current=current, target=6.0, horizon=100, num_rows=8)
        coefs.append(coef)
    return coefs


def overlong_penalties() -> list[float]:
    """The penalties of the lengths."""
    lengths = torch.tensor(cases.LENGTHS)
    return overlong_penalty(lengths, max_tokens=cases.HORIZON, buffer=cases.BUFFER, factor=0.5).tolist()


@cache
def _garbled(key: str) -> Batch:
    return cases.named(key).with_garbage()


def rows_of(batch: Batch, **renamed: str) -> dict[str, Tensor]:
    """Columns under the names that estimators and losses read; `log_probs` is of the rollout."""
    names = {"log_probs": "old_log_probs"} | {name: name for name in ("ref_log_probs", "values", "scores")}
    return {"response_mask": batch.mask} | {name: batch[of] for name, of in (names | renamed).items()}


def estimated(batch: Batch, *, estimator: Estimator, scores: str = "scores") -> Found:
    """Advantages, and returns if there are."""
    found = estimator(rows_of(batch, scores=scores, greedy_scores="greedy_scores"))
    return {name: found[name] for name in ("advantages", "returns") if name in found}


def returned(batch: Batch, *, estimator: ReturnEstimator, scores: str = "rewards") -> Found:
    """Advantages, and what they were before whitening."""
    rows = rows_of(batch, scores=scores)
    raw = replace(estimator, whiten=False)(rows)["advantages"]
    return {"advantages": estimator(rows)["advantages"], "returns": raw}


def trained(batch: Batch, *, loss: Loss, advantages: str = "advantages", old: str = "old_log_probs") -> Found:
    """Loss, gradient with respect to the log-probabilities, and share of clipped tokens if it has one."""
    leaf = batch["log_probs"].clone().requires_grad_()
    rows = rows_of(batch, advantages=advantages, log_probs=old, rollout_log_probs="rollout_log_probs")
    value, metrics = loss({"log_probs": leaf, "entropy": batch["entropy"]}, rows, loss.count(rows))
    return _differentiated(value, leaf, metrics)


def valued(batch: Batch, *, loss: Loss) -> Found:
    """The same with respect to the values."""
    leaf = batch["values"].clone().requires_grad_()
    rows = rows_of(batch, values="old_values", returns="returns")
    rows["margins"] = torch.tensor(cases.MARGINS).repeat_interleave(2)
    value, metrics = loss({"values": leaf}, rows, loss.count(rows))
    return _differentiated(value, leaf, metrics)


def corrected(batch: Batch, *, correction: OffPolicyCorrection) -> Found:
    """The policy loss with the weights, and the weights."""
    weights, _ = correction(
        batch["old_log_probs"], batch["rollout_log_probs"], batch.mask, num_tokens=int(batch.mask.sum())
    )
    found = trained(batch, loss=PolicyLoss(correction=correction))
    kl = kl_estimate(batch["rollout_log_probs"], batch["old_log_probs"], "k3", mask=batch.mask)
    return found | {"weights": weights, "mismatch_kl": masked_mean(kl, batch.mask)}


def _differentiated(loss: Tensor, leaf: Tensor, metrics: Mapping[str, Tensor]) -> Found:
    found: Found = {"loss": loss, "gradient": torch.autograd.grad(loss, leaf)[0]}
    for name, clipped in metrics.items():
        if name.endswith("/clip_fraction"):
            found["clipped"] = clipped
    return found
