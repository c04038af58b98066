"""Batches of several calls one after the other, whose prompts are of several widths."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.functional import pad

from rlhf_lightning.controller import GROUPS, Batch
from rlhf_lightning.workers.actor import PROMPTS


def joined(batches: Sequence[Batch]) -> Batch:
    """The rows of all, whose prompts [B, P] are widened on the left to the widest.

    Args:
        batches: with `prompt_ids` and `prompt_mask`; what not all have is left out.
    """
    width = max(batch["prompt_mask"].shape[1] for batch in batches)
    return Batch.joined([_widened(batch, width) for batch in batches])


def trimmed(batch: Batch) -> Batch:
    """The rows without columns in which no prompt has a token."""
    used = batch["prompt_mask"].any(0)
    first = int(used.int().argmax())
    return batch | {name: batch[name][:, first:] for name in PROMPTS} if first else batch


def rows_together(batch: Batch) -> int:
    """Rows of each group, 1 where there are none; all groups are of one size."""
    if GROUPS not in batch or not len(batch):
        return 1
    ids = batch[GROUPS]
    return len(ids) // (int((ids[1:] != ids[:-1]).sum()) + 1)


def _widened(batch: Batch, width: int) -> Batch:
    missing = width - batch["prompt_mask"].shape[1]
    if not missing:
        return batch
    return batch | {name: pad(batch[name], (missing, 0)) for name in PROMPTS}
