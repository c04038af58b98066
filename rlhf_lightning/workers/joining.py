"""Concatenation of batches whose prompts or answers have different widths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.controller import GROUPS, Batch
from rlhf_lightning.workers.actor import PROMPTS

_ANSWERED = "response_mask"


def joined(batches: Sequence[Batch]) -> Batch:
    """Concatenate the rows; prompts [B, P] are padded on the left to the widest, answers [B, R] on the right.

    Other columns [B, W, ...] of several widths are padded as answers are, with zeros: those in this process,
    and where answers differ in width all.

    Args:
        batches: with `prompt_ids` and `prompt_mask`; only the columns that all of them have are kept.
    """
    parts = [_widened(part, n) for part, n in zip(batches, _missing(batches, "prompt_mask"), strict=True)]
    names = [n for n in batches[0] if n not in PROMPTS and all(n in batch for batch in batches)]
    several = _ANSWERED in names and any(_missing(batches, _ANSWERED))
    for name in names:
        if several or all(batch.is_here(name) for batch in batches):
            parts = _lengthened(parts, name)
    return Batch.joined(parts)


def beside(batches: Sequence[Batch]) -> Batch:
    """The rows of batches over the same prompts side by side, given answers and drawn ones: a b a b ...

    Args:
        batches: as for `joined`, in the order of a group, such as chosen, rejected. Each has `row_ids` [B],
            or `group_ids` where `answers_to` has changed those.

    Returns:
        The columns that all of them have, and `group_ids`, by which rows in another order are refused.

    Raises:
        ValueError: there is no batch, or one has other prompts than the first.
    """
    if not batches:
        raise ValueError("beside([]): give at least one batch.")
    groups = [batch[GROUPS if GROUPS in batch else "row_ids"] for batch in batches]
    first, times = groups[0], len(groups)
    if apart := [number for number, ids in enumerate(groups) if not torch.equal(ids, first)]:
        raise ValueError(
            f"beside({times} batches): number {apart[0] + 1} has other prompts than the first, by its "
            "row_ids. Give batches of the same rows; under one-step-off generate_sequences returns earlier "
            "rows, so take given answers from what it returns, as columns."
        )
    order = torch.arange(times * len(first)).view(times, -1).T.flatten()
    return joined(batches).take(order.numpy()) | {GROUPS: first.repeat_interleave(times)}


def trimmed(batch: Batch) -> Batch:
    """The batch with the padding removed that all prompts have on the left."""
    used = batch["prompt_mask"].any(0)
    first = int(used.int().argmax())
    return batch | {name: batch[name][:, first:] for name in PROMPTS} if first else batch


def rows_together(batch: Batch) -> int:
    """The size of the groups in `group_ids`, which are all of one size; 1 where there are none.

    Neighbouring groups of one number, as of a prompt that a sampler draws twice, count as several.

    Raises:
        ValueError: the groups differ in size.
    """
    if GROUPS not in batch or not len(batch):
        return 1
    sizes = batch[GROUPS].unique_consecutive(return_counts=True)[1]
    least, most = int(sizes.min()), int(sizes.max())
    if (sizes % least).any() or len(batch) >= 2 * least * len(sizes):
        raise ValueError(
            f"{GROUPS}: groups of {least} and of {most} neighbours in one batch, and groups of one size are "
            "kept together. Give each prompt as many answers."
        )
    return least


def _missing(batches: Sequence[Batch], mask: str) -> list[int]:
    """By how many positions the mask of each is narrower than the widest."""
    widths = [batch[mask].shape[1] for batch in batches]
    return [max(widths) - width for width in widths]


def _widened(batch: Batch, missing: int) -> Batch:
    if not missing:
        return batch
    return batch | {name: pad(batch[name], (missing, 0)) for name in PROMPTS}


def _lengthened(batches: Sequence[Batch], name: str) -> list[Batch]:
    """The batches with a column padded to its widest; as they are where it has one width, or none."""
    columns = [batch.column(name).fetch(name) for batch in batches]
    wide = [c for c in columns if isinstance(c, Tensor) and c.dim() > 1]
    most = max((column.shape[1] for column in wide), default=0)
    if len(wide) < len(columns) or all(column.shape[1] == most for column in wide):
        return list(batches)
    sides = [(*(0, 0) * (column.dim() - 2), 0, most - column.shape[1]) for column in wide]
    padded = [pad(column, side) for column, side in zip(wide, sides, strict=True)]
    return [batch | {name: column} for batch, column in zip(batches, padded, strict=True)]
