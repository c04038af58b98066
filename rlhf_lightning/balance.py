"""The order of a mini-batch's rows that gives devices as many tokens each."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.controller import GROUPS, Batch
from rlhf_lightning.parallel.shares import evened


def tokens_of(batch: Batch) -> Tensor | None:
    """[B] int64, tokens of each row, of its prompt and its response; None where they are not known.

    Args:
        batch: with `row_ends` [B] int64, tokens of the responses, and `prompt_mask` [B, P] bool, or not.
    """
    if not {"row_ends", "prompt_mask"} <= set(batch):
        return None
    return batch["row_ends"] + batch["prompt_mask"].sum(dim=1)


def balanced(batch: Batch, tokens: Tensor | None, *, together: int = 1) -> Batch:
    """Put rows so that devices which take equal numbers of them, side by side, take about as many tokens.

    Answers to one prompt stay side by side, since a device computes their prompt once. Where the lengths are
    not known, or all alike, nothing moves.

    Args:
        batch: with `group_ids` [B] int64 where several rows answer a prompt.
        tokens: what `tokens_of` says of these rows.
        together: neighbouring rows that stay side by side.
    """
    if tokens is None or len(batch) % together:
        return batch
    if GROUPS in batch:
        sizes = batch[GROUPS].unique_consecutive(return_counts=True)[1].unique().tolist()
        together = sizes[0] if len(sizes) == 1 and sizes[0] % together == 0 else together
    groups = evened(tokens.view(-1, together).sum(dim=1).tolist())
    if groups == sorted(groups):
        return batch
    rows = torch.tensor(groups)[:, None] * together + torch.arange(together)
    return batch.take(rows.flatten().numpy())
