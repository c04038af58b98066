"""Encoded rows, and padded batches of them.

B rows, P prompt width, R response width; both widths are the longest of the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict, cast

import torch
from torch.utils.data import Dataset

from rlhf_lightning.data.sampler import INDEX_MASK

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.rows import Row

Extra: TypeAlias = "bool | float | array[int] | array[float]"
"""What a further column says of a row: one value, or one for each token of its response (typecode b or f)."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row, in token ids."""

    row_id: int
    row: Row
    prompt: array[int]
    response: array[int] | None
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """Further columns of the batch, by name."""


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
    """[B] float32, by how much the chosen response of a row's pair is better: the same for both rows."""
    safe: NotRequired[Tensor]
    """[B] bool, whether the response does no harm."""
    labels: NotRequired[Tensor]
    """[B] bool, whether the response is desirable."""
    step_mask: NotRequired[Tensor]
    """[B, R] bool, True at the last token of each step."""
    step_labels: NotRequired[Tensor]
    """[B, R] float32 in [0, 1], 0 where `step_mask` is False."""
    ptx: NotRequired[RowBatch]
    """A batch of the pre-training data, of its own size."""


@dataclass(frozen=True, kw_only=True)
class EncodedRows(Dataset[list[Sample]]):
    """The rows that fit; a key of the sampler draws one, or the two of a pair."""

    rows: list[Row]
    prompts: list[array[int]]
    responses: list[array[int]] | None
    extras: Mapping[str, Sequence[Extra]] = field(default_factory=dict)
    """Further columns, by name: one value a row."""
    group: int = 1
    """Neighbouring rows that a key draws together."""
    key_offset: int = 0
    """Added to the keys to make the row ids."""

    def __len__(self) -> int:
        return len(self.rows) // self.group

    def longest(self, new_tokens: int | None) -> int:
        """Tokens of the longest prompt with so many new tokens; None: with its response."""
        tails = map(len, self.responses or ()) if new_tokens is None else [new_tokens] * len(self.rows)
        return max(len(prompt) + tail for prompt, tail in zip(self.prompts, tails, strict=True))

    def first_of_each(self, together: int) -> EncodedRows:
        """The first of each group of neighbouring rows, drawn one by one: each prompt once."""
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

    def __getitem__(self, key: int) -> list[Sample]:
        first = (key & INDEX_MASK) * self.group
        return [
            Sample(
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
    """Pads samples into a batch."""

    pad_token_id: int

    def __call__(self, groups: Sequence[Sequence[Sample]]) -> RowBatch:
        """Pad prompts on the left and responses on the right."""
        samples = [sample for group in groups for sample in group]
        prompt_ids, prompt_mask = padded([sample.prompt for sample in samples], self.pad_token_id, left=True)
        batch: RowBatch = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "row_ids": torch.tensor([sample.row_id for sample in samples], dtype=torch.int64),
            "rows": [dict(sample.row) for sample in samples],
        }
        if len(groups) < len(samples):
            ids = [group[0].row_id for group in groups for _ in group]
            batch["group_ids"] = torch.tensor(ids, dtype=torch.int64)
        responses = [sample.response for sample in samples if sample.response is not None]
        if responses:
            batch["response_ids"], batch["response_mask"] = padded(responses, self.pad_token_id, left=False)
        extras = {name: _column([sample.extras[name] for sample in samples]) for name in samples[0].extras}
        return cast("RowBatch", {**batch, **extras})


def padded(sequences: Sequence[Sequence[int]], pad: int = 0, *, left: bool) -> tuple[Tensor, Tensor]:
    """Ids [B, W] int64 and the mask [B, W] bool of B sequences, W that of the longest and at least 1."""
    width = max([1, *map(len, sequences)])
    ids = torch.full((len(sequences), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(sequences), width), dtype=torch.bool)
    for index, sequence in enumerate(sequences):
        span = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[index, span] = torch.tensor(sequence, dtype=torch.int64)
        mask[index, span] = True
    return ids, mask


def _column(values: Sequence[Extra]) -> Tensor:
    """One value a row makes [B], one a token [B, R] padded with 0; bool or float32, as the values are."""
    arrays = [value for value in values if isinstance(value, array)]
    if not arrays:
        return torch.tensor(values, dtype=torch.bool if isinstance(values[0], bool) else torch.float32)
    kind = torch.bool if arrays[0].typecode == "b" else torch.float32
    column = torch.zeros(len(arrays), max(map(len, arrays)), dtype=kind)
    for index, value in enumerate(arrays):
        column[index, : len(value)] = torch.tensor(value, dtype=kind)
    return column


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that fills a row; the masks say where, so that any token will do."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if isinstance(token, int))
