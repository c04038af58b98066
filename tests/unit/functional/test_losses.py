from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import (
    CISPOLoss,
    Counts,
    GeometricPolicyLoss,
    Loss,
    OffPolicyCorrection,
    PolicyLoss,
    ReinforceLoss,
    SAPOLoss,
    SequencePolicyLoss,
    SFTLoss,
    ValueLoss,
)
from tests.unit.functional.cases import MASKS, close, mask_of
from tests.unit.functional.rows import batch_of

LOSSES: dict[str, Loss] = {
    "ppo": PolicyLoss(),
    "everything": PolicyLoss(
        clip_high=0.28, dual_clip=3.0, entropy_coef=0.01, kl_coef=0.1, aggregation="seq-mean-token-mean"
    ),
    "dr_grpo": PolicyLoss(aggregation="seq-mean-token-sum-norm", horizon=8, kl_coef=0.1, kl_estimator="k3+"),
    "tis": PolicyLoss(correction=OffPolicyCorrection(), aggregation="seq-mean-token-sum"),
    "icepop": PolicyLoss(correction=OffPolicyCorrection(level="sequence", mode="mask", low=0.5, high=5.0)),
    "gspo": SequencePolicyLoss(clip_low=0.2, clip_high=0.3),
    "gspo_tis": SequencePolicyLoss(clip_low=0.2, clip_high=0.3, correction=OffPolicyCorrection()),
    "gmpo": GeometricPolicyLoss(entropy_coef=0.01),
    "gmpo_tokens": GeometricPolicyLoss(aggregation="token-mean", kl_coef=0.1),
    "cispo": CISPOLoss(),
    "cispo_absolute": CISPOLoss(absolute_high=True, clip_high=5.0, kl_coef=0.1, kl_estimator="k1+"),
    "sapo": SAPOLoss(entropy_coef=0.01, kl_coef=0.1),
    "reinforce": ReinforceLoss(entropy_coef=0.01),
    "value": ValueLoss(),
    "value_unclipped": ValueLoss(clip=None, coef=0.5),
    "sft": SFTLoss(),
    "sft_rows": SFTLoss(aggregation="seq-mean-token-sum", coef=0.1),
}


def gradients(loss: Loss, mask: Tensor, size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of the outputs, and metrics, with the rows in micro-batches of `size`."""
    outputs, rows = batch_of(mask)
    leaves = {name: x.clone().requires_grad_() for name, x in outputs.items()}
    totals: dict[str, Tensor] = {}
    for start in range(0, len(mask), size):
        part = slice(start, start + size)
        value, metrics = loss(
            {name: x[part] for name, x in leaves.items()},
            {name: x[part] for name, x in rows.items()},
            Counts.of(mask),
        )
        torch.autograd.backward(value)
        totals = {name: totals.get(name, torch.zeros(())) + x for name, x in metrics.items()}
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()]
    return torch.stack(grads), totals


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_give_the_same_gradients(name: str, size: int) -> None:
    for case in MASKS:
        compare(LOSSES[name], mask_of(case), size)


def compare(loss: Loss, mask: Tensor, size: int) -> None:
    whole, metrics = gradients(loss, mask, len(mask))
    parts, part_metrics = gradients(loss, mask, size)
    assert torch.equal(parts, whole)  # each entry comes from one row: the same operations, bit for bit
    for key, value in metrics.items():
        close(part_metrics[key], float(value))  # sums of up to four parts
    assert torch.isfinite(whole).all()
    assert (whole[:, ~mask] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_contract(name: str) -> None:
    """It pickles, compares, reads only the columns that it names, and gives finished scalars."""
    loss = LOSSES[name]
    assert pickle.loads(pickle.dumps(loss)) == loss  # noqa: S301
    mask = mask_of("gap_inside")
    outputs, rows = batch_of(mask)
    rows = {key: rows[key] for key in (*loss.columns, "response_mask")}
    if not loss.needs_entropy:
        del outputs["entropy"]
    value, metrics = loss({key: x.requires_grad_() for key, x in outputs.items()}, rows, Counts.of(mask))
    assert value.shape == ()
    assert value.dtype == torch.float32
    assert all(x.shape == () and not x.requires_grad for x in metrics.values())
    assert all("/" in key for key in metrics)
