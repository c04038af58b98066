"""Encoded rows, and padded batches of them.

B rows, P prompt width, R response width; both widths are the longest of the batch.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict, cast

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from rlhf_lightning.data.sampler import INDEX_MASK

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.rows import Row

Extra: TypeAlias = "bool | float | array[int] | array[float]"
"""A row's part of an extra column: one value, or one for each token of its response (typecode b or f)."""


@dataclass(frozen=True, kw_only=True)
class EncodedRow:
    """One row, in token ids."""

    row_id: int
    """Unique per row and epoch."""
    row: Row
    """The raw row."""
    prompt: array[int]
    """Token ids."""
    response: array[int] | None
    """Token ids; None where rows are prompts only."""
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """Its parts of extra columns of the batch, by name."""


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
    """[B, R] int64, right-padded, ending in the end token (blocks of text do not)."""
    response_mask: NotRequired[Tensor]
    """[B, R] bool, True at the response's tokens, the end token included."""
    group_ids: NotRequired[Tensor]
    """[B] int64, the same for both rows of a pair, and for no others."""
    margins: NotRequired[Tensor]
    """[B] float32, by how much the chosen response of the row's pair is better: the same for both rows."""
    safe: NotRequired[Tensor]
    """[B] bool, whether the response does no harm."""
    labels: NotRequired[Tensor]
    """[B] bool, whether the response is desirable."""
    step_mask: NotRequired[Tensor]
    """[B, R] bool, True at the last token of each step, for the last step the end token."""
    step_labels: NotRequired[Tensor]
    """[B, R] float32 in [0, 1], 0 where `step_mask` is False."""
    ptx: NotRequired[RowBatch]
    """A batch of the pre-training data, of its own size."""


@dataclass(frozen=True, kw_only=True)
class EncodedRows(Dataset[list[EncodedRow]]):
    """All rows that fit, as a data set: indices are keys of `EpochSampler`, an item is a row or a pair."""

    rows: list[Row]
    prompts: list[array[int]]
    responses: list[array[int]] | None
    extras: Mapping[str, Sequence[Extra]] = field(default_factory=dict)
    """Extra columns, by name: one item a row."""
    group: int = 1
    """Neighbouring rows that a key draws together: 2 for pairs."""
    key_offset: int = 0
    """Added to the keys to make the row ids."""

    def __len__(self) -> int:
        return len(self.rows) // self.group

    @cached_property
    def fingerprint(self) -> int:
        """A number that other prompts, or the same in another order, have not but by chance."""
        return reduce(lambda crc, prompt: zlib.crc32(prompt, crc), self.prompts, 0)

    def longest(self, new_tokens: int | None) -> int:
        """Most tokens of a prompt with `new_tokens` after it; None: with its response."""
        tails = map(len, self.responses or ()) if new_tokens is None else [new_tokens] * len(self.rows)
        return max(len(prompt) + tail for prompt, tail in zip(self.prompts, tails, strict=True))

    def with_token_from(self, size: int) -> tuple[int, int] | None:
        """Index of the first row with a token id of `size` or more, and the id; None: no row has one."""
        for index, prompt in enumerate(self.prompts):
            highest = max(*prompt, *(self.responses[index] if self.responses else ()), -1)
            if highest >= size:
                return index, highest
        return None

    def first_of_each(self, together: int) -> EncodedRows:
        """The first of every `together` neighbouring rows, drawn one by one: each prompt comes once."""
        if together == 1:
            return self
        return replace(
            self,
            rows=self.rows[::together],
            prompts=self.prompts[::together],
            responses=None if self.responses is None else self.responses[::together],
            extras={name: values[::together] for name, values in self.extras.items()},
            group=1,
        )

    def __getitem__(self, key: int) -> list[EncodedRow]:
        first = (key & INDEX_MASK) * self.group
        return [
            EncodedRow(
                row_id=(key + self.key_offset) * self.group + member,
                row=self.rows[first + member],
                prompt=self.prompts[first + member],
                response=None if self.responses is None else self.responses[first + member],
                extras={name: values[first + member] for name, values in self.extras.items()},
            )
            for member in range(self.group)
        ]


@dataclass(frozen=True, kw_only=True)
class Collate:
    """Pads encoded rows into a batch."""

    pad_token_id: int

    def __call__(self, groups: Sequence[Sequence[EncodedRow]]) -> RowBatch:
        """Pad prompts on the left and responses on the right."""
        rows = [row for group in groups for row in group]
        prompt_ids, prompt_mask = padded([row.prompt for row in rows], self.pad_token_id, left=True)
        batch: RowBatch = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "row_ids": torch.tensor([row.row_id for row in rows], dtype=torch.int64),
            "rows": [dict(row.row) for row in rows],
        }
        if len(groups) < len(rows):
            ids = [group[0].row_id for group in groups for _ in group]
            batch["group_ids"] = torch.tensor(ids, dtype=torch.int64)
        responses = [row.response for row in rows if row.response is not None]
        if responses:
            batch["response_ids"], batch["response_mask"] = padded(responses, self.pad_token_id, left=False)
        extras = {name: _column([row.extras[name] for row in rows]) for name in rows[0].extras}
        return cast("RowBatch", {**batch, **extras})


def padded(sequences: Sequence[Sequence[int]], pad: int = 0, *, left: bool) -> tuple[Tensor, Tensor]:
    """Ids [B, W] int64 and their mask [B, W] bool, for B sequences; W is the longest, at least 1."""
    width = max([1, *map(len, sequences)])
    ids = torch.full((len(sequences), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(sequences), width), dtype=torch.bool)
    for index, sequence in enumerate(sequences):
        span = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[index, span] = torch.tensor(sequence, dtype=torch.int64)
        mask[index, span] = True
    return ids, mask


def _column(values: Sequence[Extra]) -> Tensor:
    """An extra column: [B] of one value a row, or [B, R] of one a token, padded with 0; bool or float32."""
    arrays = [value for value in values if isinstance(value, array)]
    if not arrays:
        return torch.tensor(values, dtype=torch.bool if isinstance(values[0], bool) else torch.float32)
    kind = torch.bool if arrays[0].typecode == "b" else torch.float32
    return pad_sequence([torch.tensor(value, dtype=kind) for value in arrays], batch_first=True)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that pads rows: any will do, since the masks say where padding is."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if isinstance(token, int))
