"""Rows that are answers to one prompt, or a pair: neighbours of one number."""

from __future__ import annotations

import torch

from rlhf_lightning.controller.batch import Batch

GROUPS = "group_ids"
"""A column: equal in neighbouring rows that are answers to one prompt."""

ORIGINS = "origin_ids"
"""A column that copies have: the ids that the data gave their rows, through every further copy."""


def copies_of(batch: Batch, times: int) -> Batch:
    """Each row several times, side by side.

    Args:
        batch: B prompts, with `row_ids` [B] int64.
        times: copies of each row: each has a row id of its own, in `group_ids` that of the row, and in
            `origin_ids` that which the data gave, where the row is a copy itself.

    Raises:
        ValueError: `times` is below 1.
    """
    if times < 1:
        raise ValueError(f"answers_to(batch, {times}): leaves no prompt to be answered. Give at least 1.")
    numbers = torch.arange(times).repeat(len(batch))
    repeated = batch.repeat(times)
    row_ids = repeated["row_ids"] * times + numbers
    origins = repeated[ORIGINS if ORIGINS in repeated else "row_ids"]
    return repeated | {"row_ids": row_ids, GROUPS: repeated["row_ids"], ORIGINS: origins}


def check_neighbours(what: str, batch: Batch, together: int) -> None:
    """Refuse answers to several prompts where neighbours are compared, such as the two of a pair.

    Args:
        what: compares them, for the message.
        batch: with `group_ids`, or without, where nothing is known.
        together: neighbours that are compared.

    Raises:
        ValueError: the rows are no whole groups of that size, or neighbours answer different prompts.
    """
    if len(batch) % together:
        raise ValueError(
            f"{what} compares {together} neighbouring rows at a time, and {len(batch)} rows are no whole "
            f"groups of {together}: {len(batch) % together} are left over. Give a multiple of {together}."
        )
    if together == 1 or GROUPS not in batch:
        return
    ids = batch[GROUPS].view(-1, together)
    if torn := int((ids != ids[:, :1]).any(dim=1).sum()):
        raise ValueError(
            f"{what} compares {together} neighbouring rows at a time, and {torn} of {len(ids)} such groups "
            f"are of several prompts (column {GROUPS}). Keep answers to a prompt side by side: "
            f"mini_batches(batch, size=..., together={together}) does."
        )
