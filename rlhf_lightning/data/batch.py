"""Encoded rows, and padded batches of them.

B rows, P prompt width, R response width; both widths are the longest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict

import torch
from torch.utils.data import Dataset

from rlhf_lightning.data.sampler import INDEX_MASK

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.rows import Row


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row, in token ids."""

    row_id: int
    row: Row
    prompt: array[int]
    response: array[int] | None


class RowBatch(TypedDict):
    """Padded rows as they reach an algorithm's step."""

    prompt_ids: Tensor
    """[B, P] int64, left-padded."""
    prompt_mask: Tensor
    """[B, P] bool, True at the prompt's tokens."""
    row_ids: Tensor
    """[B] int64, unique per row and epoch."""
    rows: list[Row]
    """The raw rows, with `prompt` (the text that was encoded) and `data_source`."""
    response_ids: NotRequired[Tensor]
    """[B, R] int64, right-padded, ending in the end token."""
    response_mask: NotRequired[Tensor]
    """[B, R] bool, True at the response's tokens, the end token included."""


@dataclass(frozen=True, kw_only=True)
class EncodedRows(Dataset[Sample]):
    """The rows that fit, indexed by the sampler's keys."""

    rows: list[Row]
    prompts: list[array[int]]
    responses: list[array[int]] | None
    key_offset: int = 0
    """Added to the keys to make the row ids."""

    def __len__(self) -> int:
        return len(self.rows)

    def longest(self, new_tokens: int) -> int:
        """Tokens of the longest prompt with its response, or with so many new tokens where it has none."""
        tails = [new_tokens] * len(self) if self.responses is None else map(len, self.responses)
        return max(len(prompt) + tail for prompt, tail in zip(self.prompts, tails, strict=True))

    def __getitem__(self, key: int) -> Sample:
        index = key & INDEX_MASK
        response = None if self.responses is None else self.responses[index]
        return Sample(
            row_id=key + self.key_offset, row=self.rows[index], prompt=self.prompts[index], response=response
        )


@dataclass(frozen=True, kw_only=True)
class Collate:
    """Pads samples into a batch."""

    pad_token_id: int

    def __call__(self, samples: Sequence[Sample]) -> RowBatch:
        """Pad prompts on the left and responses on the right."""
        prompt_ids, prompt_mask = self._pad([sample.prompt for sample in samples], left=True)
        batch: RowBatch = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "row_ids": torch.tensor([sample.row_id for sample in samples], dtype=torch.int64),
            "rows": [dict(sample.row) for sample in samples],
        }
        responses = [sample.response for sample in samples if sample.response is not None]
        if responses:
            batch["response_ids"], batch["response_mask"] = self._pad(responses, left=False)
        return batch

    def _pad(self, sequences: Sequence[array[int]], *, left: bool) -> tuple[Tensor, Tensor]:
        width = max(len(sequence) for sequence in sequences)
        ids = torch.full((len(sequences), width), self.pad_token_id, dtype=torch.int64)
        mask = torch.zeros((len(sequences), width), dtype=torch.bool)
        for index, sequence in enumerate(sequences):
            span = slice(width - len(sequence), width) if left else slice(0, len(sequence))
            ids[index, span] = torch.tensor(sequence, dtype=torch.int64)
            mask[index, span] = True
        return ids, mask


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that fills a row; the masks say where, so that any token will do."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if isinstance(token, int))
