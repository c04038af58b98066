"""Columns that estimators read, with garbage under the mask."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.unit.functional.cases import noise

TOKENS = ("scores", "log_probs", "ref_log_probs", "values", "costs", "cost_values")


def columns_of(mask: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every column that some estimator reads: [B, R], and greedy_scores [B]."""
    columns = {name: noise(mask, 20 + seed, dtype=dtype) for seed, name in enumerate(TOKENS)}
    greedy = torch.randn(len(mask), generator=torch.Generator().manual_seed(30)).to(dtype)
    cut = mask & mask[:, -1:]
    return columns | {"response_mask": mask, "truncated_mask": cut, "greedy_scores": greedy}
