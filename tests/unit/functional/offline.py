"""Batches for the losses of the offline algorithms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.unit.functional.cases import noise

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
