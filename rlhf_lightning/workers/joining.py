"""Concatenation of batches whose prompts or answers have different widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

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
    parts = [_widened(part, n) for part, n in zip(batches, _missing(batches, "prompt_mask"), strict=True)]
    if all(_ANSWERED in batch for batch in batches):
        missing = _missing(batches, _ANSWERED)
        parts = [_lengthened(part, n) for part, n in zip(parts, missing, strict=True)]
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


def _missing(batches: Sequence[Batch], mask: str) -> list[int]:
    """By how many positions the mask of each is narrower than the widest."""
    widths = [batch[mask].shape[1] for batch in batches]
    return [max(widths) - width for width in widths]


def _widened(batch: Batch, missing: int) -> Batch:
    if not missing:
        return batch
    return batch | {name: pad(batch[name], (missing, 0)) for name in PROMPTS}


def _lengthened(batch: Batch, missing: int) -> Batch:
    if not missing:
        return batch
    fetched = {name: batch.column(name).fetch() for name in batch if name not in PROMPTS}
    present = cast(Tensor, fetched[_ANSWERED]).shape[1]
    return batch | {
        name: pad(column, (0, missing))
        for name, column in fetched.items()
        if isinstance(column, Tensor) and column.shape[1:] == (present,)
    }
