"""The promises that each loss of the offline algorithms keeps."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import (
    CostLoss,
    Counts,
    DistillationLoss,
    DPOLoss,
    KTOLoss,
    Loss,
    PairwiseLoss,
    SimPOLoss,
    StepLoss,
)
from tests.unit.functional.cases import close
from tests.unit.functional.offline import MASKS, Batch, batch_of, mask_of

LOSSES: tuple[Loss, ...] = (
    DPOLoss(),
    DPOLoss(label_smoothing=0.2, sft_coef=0.5),
    DPOLoss(kind="robust", label_smoothing=0.1, length_average=True),
    DPOLoss(kind="ipo", beta=0.5),
    DPOLoss(kind="ipo", length_average=False),
    DPOLoss(kind="hinge", beta=1.0, sft_coef=1.0),
    SimPOLoss(),
    SimPOLoss(kind="hinge", beta=0.5, gamma=0.2),
    SimPOLoss(label_smoothing=0.1, sft_coef=0.2),
    SimPOLoss(beta=0.1, gamma=0.0, length_average=False, sft_coef=1.0),
    KTOLoss(),
    KTOLoss(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5),
    KTOLoss(baseline=False),
    PairwiseLoss(),
    PairwiseLoss(centering=0.1),
    PairwiseLoss(centering=0.01, margin=True),
    CostLoss(),
    CostLoss(sign_coef=0.5),
    CostLoss(sign_coef=0.0),
    StepLoss(),
    DistillationLoss(),
    DistillationLoss(beta=0.0),
    DistillationLoss(beta=1.0, aggregation="seq-mean-token-mean"),
    DistillationLoss(beta=0.1, aggregation="seq-mean-token-sum-norm", horizon=4),
)


def in_parts(loss: Loss, batch: Batch, size: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients of the outputs and metrics, with the rows in micro-batches of `size`."""
    outputs, rows = batch
    leaves = {name: x.detach().clone().requires_grad_() for name, x in outputs.items()}
    slices = [slice(start, start + size) for start in range(0, len(rows["response_mask"]), size)]
    shares = [{name: x[part] for name, x in rows.items()} for part in slices]
    counts = sum((loss.count(share) for share in shares), Counts(0, 0, 0))
    assert counts == loss.count(rows)
    total, metrics = torch.zeros(()), dict[str, Tensor]()
    for part, share in zip(slices, shares, strict=True):
        value, found = loss({name: x[part] for name, x in leaves.items()}, share, counts)
        torch.autograd.backward(value)
        total = total + value.detach()
        metrics = {name: metrics.get(name, torch.zeros(())) + x for name, x in found.items()}
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return total, grads, metrics


@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_promises(loss: Loss, case: str) -> None:
    """Micro-batches change nothing, garbage reaches nothing, and an absent share is worth 0."""
    mask = mask_of(case)
    batch = batch_of(mask)
    whole, grads, metrics = in_parts(loss, batch, len(mask))
    for size in {loss.rows_together, 2}:
        total, part_grads, part_metrics = in_parts(loss, batch, size)
        close(total, float(whole))
        for name, gradient in grads.items():
            torch.testing.assert_close(part_grads[name], gradient, rtol=1e-6, atol=1e-6)
        for name, metric in metrics.items():
            close(part_metrics[name], float(metric))
    assert all(torch.isfinite(x).all() for x in (whole, *metrics.values(), *grads.values()))
    counted = mask & mask.any(dim=1).view(-1, loss.rows_together).all(dim=1).repeat_interleave(
        loss.rows_together
    ).unsqueeze(1)
    assert all((gradient[~counted] == 0).all() for gradient in grads.values())
    if case == "nothing":
        assert whole == 0
        assert all(x == 0 for x in metrics.values())
    else:
        assert any(gradient.abs().sum() > 0 for gradient in grads.values())


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_contract(loss: Loss) -> None:
    """It pickles, compares, reads only the columns that it names, and gives finished float32 scalars."""
    assert pickle.loads(pickle.dumps(loss)) == loss  # noqa: S301
    outputs, rows = batch_of(mask_of("right_padding"), torch.bfloat16)
    assert loss.candidates in {"", *loss.columns}
    rows = {name: rows[name] for name in (*loss.columns, "response_mask")}
    value, metrics = loss({name: x.requires_grad_() for name, x in outputs.items()}, rows, loss.count(rows))
    assert (value.shape, value.dtype) == ((), torch.float32)
    assert all(x.shape == () and not x.requires_grad for x in metrics.values())
    assert all("/" in name for name in metrics)
    group = next(iter(metrics)).partition("/")[0]
    assert metrics[f"{group}/loss"] == value.detach()


@pytest.mark.parametrize(
    ("loss", "columns", "rows_together"),
    [
        (DPOLoss(), ("ref_log_probs",), 2),
        (SimPOLoss(), (), 2),  # no reference
        (KTOLoss(), ("ref_log_probs", "labels", "kl_baseline"), 1),
        (KTOLoss(baseline=False), ("ref_log_probs", "labels"), 1),
        (PairwiseLoss(), (), 2),
        (PairwiseLoss(margin=True), ("margins",), 2),
        (CostLoss(), ("safe",), 2),
        (StepLoss(), ("step_labels", "step_mask"), 1),
        (DistillationLoss(), ("candidate_ids", "candidate_ref_log_probs"), 1),
    ],
    ids=str,
)
def test_what_is_read(loss: Loss, columns: tuple[str, ...], rows_together: int) -> None:
    assert (loss.columns, loss.rows_together) == (columns, rows_together)
