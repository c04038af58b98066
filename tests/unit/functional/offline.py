"""Batches for the losses of the offline algorithms, and the promises that each of those losses keeps."""

from __future__ import annotations

import math
import pickle

import torch
from torch import Tensor

from rlhf_lightning.functional import Counts, Loss
from tests.unit.functional.cases import close, noise

MASKS = {
    "right_padding": [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]],
    "gap_inside": [[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]],
    "chosen_masked": [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]],
    "rejected_masked": [[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
    "one_token": [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]],
    "nothing": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    "one_column": [[1], [1], [0], [1], [1], [1]],
}
"""Three pairs, or six single answers."""

Batch = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Outputs and rows."""


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def mask_of(name: str) -> Tensor:
    return torch.tensor(MASKS[name], dtype=torch.bool)


def batch_of(mask: Tensor, dtype: torch.dtype = torch.float32) -> Batch:
    """Every output and column, with garbage under the mask and in the numbers of rows that are masked."""
    valid, n = mask.any(dim=1), len(mask)
    outputs = {name: noise(mask, seed, dtype=dtype) for seed, name in enumerate(("log_probs", "values"))}
    pairs = valid.view(-1, 2).all(dim=1, keepdim=True).expand(-1, 2).reshape(-1)
    words = mask[..., None].expand(*mask.shape, 3)
    outputs["candidate_log_probs"] = -2 - noise(words, 6, dtype=dtype).abs()
    steps = torch.rand(mask.shape, generator=torch.Generator().manual_seed(5)) < 0.6
    rows = {
        "response_mask": mask,
        "ref_log_probs": noise(mask, 2, dtype=dtype),
        "margins": noise(pairs, 3).abs(),
        "labels": torch.arange(n) % 3 != 1,
        "safe": torch.arange(n) % 3 == 0,
        "kl_baseline": torch.where(valid, 0.3, torch.nan),
        "step_labels": noise(mask & steps, 4).sigmoid(),
        "step_mask": steps,
        "candidate_ids": torch.arange(3).expand(*mask.shape, 3),
        "candidate_ref_log_probs": -2 - noise(words, 7, dtype=dtype).abs(),
    }
    return outputs, rows


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


def keeps_its_promises(loss: Loss, case: str) -> None:
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


def keeps_the_contract(loss: Loss) -> None:
    """It pickles, compares, reads only the columns that it names, and gives finished float32 scalars."""
    assert pickle.loads(pickle.dumps(loss)) == loss  # noqa: S301
    outputs, rows = batch_of(mask_of("right_padding"), torch.bfloat16)
    rows = {name: rows[name] for name in (*loss.columns, "response_mask")}
    value, metrics = loss({name: x.requires_grad_() for name, x in outputs.items()}, rows, loss.count(rows))
    assert (value.shape, value.dtype) == ((), torch.float32)
    assert all(x.shape == () and not x.requires_grad for x in metrics.values())
    assert all("/" in name for name in metrics)
    group = next(iter(metrics)).partition("/")[0]
    assert metrics[f"{group}/loss"] == value.detach()
