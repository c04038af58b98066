"""Questions about answers: prompts of texts that are drawn for otherwise than what they ask about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_lightning.controller import ORIGINS, Batch
from rlhf_lightning.data import prompt_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUMBER_BITS = 48
"""Row ids below these bits are the data's."""


def asking(
    batch: Batch,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    number: int = 1,
    special: bool = True,
) -> Batch:
    """Prompts of texts, for a judge or another turn, with row ids of their own.

    A token is decided by the seed of the actor, the row id and the place, so that it is the same under every
    strategy and after a resume. With the ids of the answers, an actor that judges itself would draw a verdict
    with the numbers of the answer.

    Args:
        batch: what is asked about: `row_ids` [B] int64, and `rows`.
        texts: B of them.
        tokenizer: of the model that is to answer.
        number: of the question, from 1: another one for each that is asked about the same batch.
        special: as in `prompt_columns`.

    Returns:
        `prompt_ids`, `prompt_mask` [B, P], `rows`, and `row_ids` [B], which no other number gives.

    Raises:
        ValueError: the number is below 1, whose draws would be those of `batch`, or a text has no tokens.
    """
    if number < 1:
        raise ValueError(
            f"asking(number={number}): counts the questions about a batch, from 1. Try number=1."
        )
    ids = {"row_ids": batch["row_ids"] + (number << _NUMBER_BITS)}
    kept = batch.select(["rows", ORIGINS] if ORIGINS in batch else ["rows"])
    return kept | prompt_columns(texts, tokenizer, special=special) | ids
