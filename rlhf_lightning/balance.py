"""Orders the rows of a mini-batch so that devices get about equally many tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.controller import GROUPS, Batch
from rlhf_lightning.functional import row_ends
from rlhf_lightning.functional.groups import rows_of_groups
from rlhf_lightning.parallel.shares import evened


def _tokens_of(batch: Batch) -> Tensor | None:
    """Tokens of each row that an update computes, prompt and response: [B] int64; None where not known.

    Args:
        batch: tokens are known if it has `prompt_mask`, and `row_ends` [B] int64, those of the responses. Of
            given answers `response_mask` tells them, which is in the controller's memory; that of drawn ones
            is on devices, and not fetched for this. A row whose response has none is not computed at all.
    """
    if "prompt_mask" not in batch:
        return None
    if "row_ends" in batch:
        ends = batch["row_ends"]
    elif "response_mask" in batch and batch.is_here("response_mask"):
        ends = row_ends(batch["response_mask"])
    else:
        return None
    return (ends + batch["prompt_mask"].sum(dim=1)) * (ends > 0)


def balanced(batch: Batch, *, together: int = 1) -> Batch:
    """Order rows so that contiguous shares with equal numbers of rows have about equally many tokens.

    Answers to one prompt stay side by side, since a device computes their prompt once. Nothing moves where
    the lengths are unknown or all the same.

    Args:
        batch: with `group_ids` [B] int64 where several rows answer a prompt.
        together: rows of a group, neighbours that stay side by side.
    """
    tokens = _tokens_of(batch)
    if tokens is None or len(batch) % together:
        return batch
    if GROUPS in batch:
        sizes = batch[GROUPS].unique_consecutive(return_counts=True)[1].unique().tolist()
        together = sizes[0] if len(sizes) == 1 and sizes[0] % together == 0 else together
    groups = evened(tokens.view(-1, together).sum(dim=1).tolist())
    if groups == sorted(groups):
        return batch
    return batch.take(rows_of_groups(torch.tensor(groups), size=together).numpy())
