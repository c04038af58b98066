"""Concatenation of batches whose prompts or answers have different widths."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.controller import GROUPS, Batch
from rlhf_lightning.workers.actor import PROMPTS

_ANSWERED = "response_mask"


def joined(batches: Sequence[Batch]) -> Batch:
    """Concatenate the rows; prompts [B, P] are padded on the left to the widest, answers [B, R] on the right.

    Args:
        batches: with `prompt_ids` and `prompt_mask`; only the columns that all of them have are kept.
    """
    width = max(batch["prompt_mask"].shape[1] for batch in batches)
    parts = [_widened(batch, width) for batch in batches]
    if all(_ANSWERED in batch for batch in batches):
        longest = max(batch[_ANSWERED].shape[1] for batch in batches)
        parts = [_lengthened(batch, longest) for batch in parts]
    return Batch.joined(parts)


def trimmed(batch: Batch) -> Batch:
    """The batch with the padding removed that all prompts have on the left."""
    used = batch["prompt_mask"].any(0)
    first = int(used.int().argmax())
    return batch | {name: batch[name][:, first:] for name in PROMPTS} if first else batch


def rows_together(batch: Batch) -> int:
    """The size of the groups in `group_ids`, which are all of one size; 1 where there are none."""
    if GROUPS not in batch or not len(batch):
        return 1
    ids = batch[GROUPS]
    return len(ids) // (int((ids[1:] != ids[:-1]).sum()) + 1)


def _widened(batch: Batch, width: int) -> Batch:
    missing = width - batch["prompt_mask"].shape[1]
    if not missing:
        return batch
    return batch | {name: pad(batch[name], (missing, 0)) for name in PROMPTS}


def _lengthened(batch: Batch, length: int) -> Batch:
    present = batch[_ANSWERED].shape[1]
    if present == length:
        return batch
    fetched = {name: batch.column(name).fetch() for name in batch if name not in PROMPTS}
    return batch | {
        name: pad(column, (0, length - present))
        for name, column in fetched.items()
        if isinstance(column, Tensor) and column.shape[1:] == (present,)
    }
