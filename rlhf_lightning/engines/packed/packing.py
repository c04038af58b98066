"""Rows of a batch -> micro-batches of a token budget -> one row of tokens without padding, and back.

Every training and scoring pass begins and ends here.

n is the number of rows, P the prompt width, R the response width, T the number of tokens of all rows (a
prompt that several rows answer counts once), K the number of valid response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.packed.attention import Packed
from rlhf_lightning.engines.packed.last_mlp import needed_tokens
from rlhf_lightning.engines.packed.sharing import Shared, share
from rlhf_lightning.engines.prompts import check_together
from rlhf_lightning.functional import row_ends
from rlhf_lightning.functional.aggregate import Loss
from rlhf_lightning.parallel.shares import fitting_together

Place = Literal["before", "after"]
"""The position whose output belongs to a response token: the one before it, which predicts it, or its own."""
COLUMNS = ("prompt_ids", "prompt_mask", "response_ids", "response_mask")
"""The columns that every pass reads."""


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows of a micro-batch, concatenated, and the positions whose outputs are needed."""

    input_ids: Tensor
    """[1, T] int64."""
    sequences: Packed | Shared
    """Which of the T tokens form a sequence."""
    keep: Tensor
    """[K] int64, for each valid response token the index among the T whose output belongs to it (`Place`)."""
    targets: Tensor
    """[K] int64, the valid response tokens."""
    mask: Tensor
    """[n, R] bool, where in the rows the valid response tokens are."""
    whole_ids: Tensor
    """[W] int64, the tokens of all sequences as if no prompt were shared."""
    lengths: tuple[int, ...]
    """Number of tokens of each sequence, as if no prompt were shared; their sum is W."""
    computed: Tensor | None
    """[T] int64, which of the W tokens are computed; None for all."""

    def unpack(self, values: Tensor) -> Tensor:
        """[K, ...] -> [n, R, ...], 0 where the mask is False; differentiable; numbers become float32."""
        values = values.float() if values.is_floating_point() else values
        zeros = values.new_zeros(*self.mask.shape, *values.shape[1:])
        mask = self.mask.view(*self.mask.shape, *(1 for _ in values.shape[1:]))
        return zeros.masked_scatter(mask, values)

    def packed(self, column: Tensor) -> Tensor:
        """[n, R, k] -> [K, k], as `unpack` takes it."""
        found = column[self.mask]
        return found if len(found) else column.new_zeros(1, column.shape[2])


def select(
    rows: TensorDict, index: list[int], loss: Loss | None, *, device: torch.device, also: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Select `COLUMNS`, those that a loss reads, and others, of some rows, on the device.

    Without rows there are fully masked ones, as many as the loss reads together.

    Raises:
        ValueError: a column is missing, or does not hold numbers.
    """
    columns, filler = ((*loss.columns, *also), loss.rows_together) if loss is not None else (also, 1)
    names, have = (*COLUMNS, *columns), set(rows.keys())
    missing = [name for name in names if name not in have]
    if missing:
        raise ValueError(f"rows: no column {missing[0]!r} among {sorted(have)}. Add it to the batch.")
    whole = {name: cast(Tensor, rows[name]) for name in names}
    if texts := [name for name in columns if not isinstance(whole[name], Tensor)]:
        raise ValueError(
            f"rows: the column {texts[0]!r} is a list of Python objects, and a loss reads tensors. Make one "
            f"of it: batch | {{{texts[0]!r}: torch.tensor(...)}}."
        )
    return {
        name: (column[index] if index else column.new_zeros(filler, *column.shape[1:])).to(device)
        for name, column in whole.items()
    }


def plan(rows: TensorDict, budget: int, loss: Loss | None) -> list[list[int]]:
    """Row numbers of each micro-batch of `budget` tokens; with a loss at least one, which may be empty."""
    lengths = row_lengths(rows["prompt_mask"], rows["response_mask"])
    parts = micro_batches(lengths, budget, together=1 if loss is None else loss.rows_together)
    return parts if parts or loss is None else [[]]


def row_lengths(prompt_mask: Tensor, response_mask: Tensor) -> list[int]:
    """Number of tokens of each row; 0 for a fully masked response, for which nothing is computed."""
    ends = row_ends(response_mask)
    return ((prompt_mask.sum(1) + ends) * (ends > 0)).tolist()


def micro_batches(lengths: Sequence[int], budget: int, *, together: int = 1) -> list[list[int]]:
    """Distribute rows over micro-batches: the row numbers of each, groups of similar length together.

    Args:
        lengths: number of tokens of each row; groups without a token are left out.
        budget: most tokens in a micro-batch; a group longer than this is a micro-batch of its own.
        together: number of neighbouring rows that form a group, which is never divided.

    Returns:
        The micro-batches, the longest rows first.
    """
    groups = [range(first, first + together) for first in range(0, len(lengths), together)]
    sizes = [sum(lengths[row] for row in group) for group in groups]
    order = sorted((n for n, size in enumerate(sizes) if size), key=lambda n: -sizes[n])
    runs = fitting_together([sizes[n] for n in order], budget)
    return [[row for n in order[run] for row in groups[n]] for run in runs]


def pack(rows: Mapping[str, Tensor], *, place: Place) -> PackedRows:
    """Concatenate rows without padding.

    Where no row has a valid token there is one filler token, so that the model can run.

    Args:
        rows: prompt_ids, prompt_mask [n, P] and response_ids, response_mask [n, R].
        place: the position whose output belongs to a response token.

    Raises:
        ValueError: a response has no prompt, and so no position that predicts its first token, or a mask is
            not bool, or that of other ids.
    """
    mask, prompt_mask = rows["response_mask"], rows["prompt_mask"]
    for name, given in (("response_mask", mask), ("prompt_mask", prompt_mask)):
        if given.dtype != torch.bool:  # numbers would be taken for positions
            raise ValueError(f"{name} holds {given.dtype}. Make it one of bool: {name}.bool().")
    check_together(rows, "prompt")
    check_together(rows, "response")
    ends, starts = row_ends(mask), prompt_mask.sum(1)
    unpredictable = (ends > 0) & (starts == 0)
    if place == "before" and bool(unpredictable.any()):
        row = int(unpredictable.nonzero()[0])
        raise ValueError(f"prompt_mask: row {row} has a response but no prompt. Add a prompt token.")
    # The last token predicts nothing that is needed: it is packed only where its own output counts.
    read = ends if place == "after" else ends - 1
    present = torch.arange(mask.shape[1], device=mask.device) < read[:, None]
    present = torch.cat([prompt_mask & (ends > 0)[:, None], present], 1)
    lengths = present.sum(1)
    offsets = lengths.cumsum(0) - lengths + starts - int(place == "before")
    keep = (offsets[:, None] + torch.arange(mask.shape[1], device=mask.device))[mask]
    targets = rows["response_ids"][mask]
    ids = torch.cat([rows["prompt_ids"], rows["response_ids"]], 1)[present]
    sizes = [size for size in lengths.tolist() if size]
    if not sizes:
        ids, sizes, keep, targets = ids.new_zeros(1), [1], keep.new_zeros(1), targets.new_zeros(1)
    whole = Packed(sizes, device=mask.device)
    shared = share(whole, present, rows["prompt_ids"])
    keep, input_ids = (shared.source[keep], ids[shared.computed]) if shared else (keep, ids)
    sequences = shared or whole
    sequences.needed = needed_tokens(keep, tokens=len(input_ids))
    return PackedRows(
        input_ids=input_ids[None],
        sequences=sequences,
        keep=keep,
        targets=targets,
        mask=mask,
        whole_ids=ids,
        lengths=whole.lengths,
        computed=shared.computed if shared else None,
    )
