"""Records the matrix products of a generation, for the update that learns from the same answers.

    decoding    the outputs of every linear layer for every token go into the record, token by token
    update      for rows in the record the linear layers are given these outputs: the forward pass computes
                norms, activations and attention only, and the backward pass runs as usual

The record is valid for the current weights only: whatever changes them must call `forget`.

B is the number of rows of a generation, T the tokens of a call of the decoder, O the outputs of a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_lightning.engines.conversion import OUTPUT, Conversion
from rlhf_lightning.engines.host_linear import HostLinear
from rlhf_lightning.engines.packed.packing import PackedRows

Product = Literal["qkv", "proj", "fc1", "fc2", "output"]
_WEIGHTS: dict[Product, str] = {
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
"""For each product of a decoder layer, the name of its weight."""


class Record:
    """See the head of the module.

    Args:
        module: a model that `can_fuse` accepts.
        tokens: most tokens of a generation; one that may have more is not recorded.
    """

    def __init__(self, module: PreTrainedModel, tokens: int) -> None:
        self._module, self._conversion, self._room = module, Conversion(module.config), tokens
        self.open = False
        """Whether a generation is being recorded."""
        self.size = 0
        """Tokens in the record."""
        self._products: dict[tuple[int, Product], list[Tensor]] = {}
        """[T, O] of each call, by a layer's number and a product of it; the output layer's number is -1."""
        self._logits_of: list[Tensor] = []
        """[K] int64 of each call, the tokens whose logits were computed."""
        self._where = torch.empty(0, 0, dtype=torch.int64)
        """[B, longest row] int64, where in the record each token of a row is; -1: nowhere."""
        self._rows: dict[bytes, int] = {}
        """By the tokens of a row but the last, which is never fed."""

    def begin(self, lengths: Sequence[int], new_tokens: int) -> bool:
        """Forget everything, and record a generation if there is room for it.

        Args:
            lengths: of the prompts.
            new_tokens: most tokens of a response.

        Returns:
            Whether it is recorded.
        """
        self.forget()
        tokens = sum(lengths) + len(lengths) * (new_tokens - 1)
        self.open = 0 < tokens <= self._room
        if self.open:
            self._where = torch.full((len(lengths), max(lengths) + new_tokens - 1), -1)
        return self.open

    def keep(self, layer: int, product: Product, output: Tensor) -> None:
        """Record a product of the next tokens, [T, O]; nothing may write to it afterwards."""
        if self.open:
            self._products.setdefault((layer, product), []).append(output)

    def finish(self, count: int, logits: Tensor, at: Tensor | None) -> None:
        """Record the last product of the next `count` tokens: logits [K, V] at `at` [K] int64, or at all."""
        self.keep(-1, "output", logits)
        if self.open:
            self._logits_of.append(self.size + (torch.arange(count) if at is None else at))
            self.size += count

    def note(self, row: Tensor, place: Tensor, token: Tensor) -> None:
        """Register tokens of the next call: its `token` is at position `place` of `row`, [any] int64 each."""
        self._where[row, place] = token + self.size

    def end(self, fed: Sequence[np.ndarray]) -> None:
        """End the generation, given the tokens that each row was fed, int64; incomplete rows are left out."""
        self.open = False
        for row, tokens in enumerate(fed):
            if len(tokens) and bool((self._where[row, : len(tokens)] >= 0).all()):
                self._rows[tokens.tobytes()] = row

    def forget(self) -> None:
        """Free everything."""
        self.open, self.size = False, 0
        self._products.clear()
        self._logits_of.clear()
        self._rows.clear()

    @contextmanager
    def given(self, packed: PackedRows) -> Iterator[None]:
        """Within this context linear layers return recorded products, where those of all rows are there."""
        places = self._find(packed)
        try:
            if places is not None:
                last, needed = self._module.config.num_hidden_layers - 1, packed.sequences.needed
                wanted = {(-1, "output"): self._logit_rows(places[packed.keep])}
                if needed is not None:  # the last MLP computes these tokens only
                    wanted |= dict.fromkeys([(last, "fc1"), (last, "fc2")], places[needed])
                for key, outputs in self._products.items():
                    outputs[:] = [torch.cat(outputs)] if len(outputs) > 1 else outputs
                    self._give(*key, outputs[0].index_select(0, wanted.get(key, places)))
            yield
        finally:
            for number, product in self._products if places is not None else ():
                for layer in self._layers(number, product):
                    layer.known_output = None

    def _find(self, packed: PackedRows) -> Tensor | None:
        """[T] int64, where in the record the computed tokens are; None where not all of it is recorded."""
        if not self._rows:
            return None
        ids, ends = packed.whole_ids.numpy(), [0, *accumulate(packed.lengths)]
        rows = [self._rows.get(ids[first:last].tobytes()) for first, last in pairwise(ends)]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            return None
        places = [self._where[row, :length] for row, length in zip(known, packed.lengths, strict=True)]
        whole = torch.cat(places)
        found = whole if packed.computed is None else whole[packed.computed]
        # Of equal rows the last is known: its logits begin where its prompt ends, perhaps behind another's.
        return found if bool((self._logit_rows(found[packed.keep]) >= 0).all()) else None

    def _logit_rows(self, tokens: Tensor) -> Tensor:
        """[K] int64, the rows of these tokens among all recorded logits; -1 where there are none."""
        row = torch.full((self.size,), -1)
        known = torch.cat(self._logits_of)
        row[known] = torch.arange(len(known))
        return row[tokens]

    def _give(self, number: int, product: Product, found: Tensor) -> None:
        parts = self._conversion.split(_weight(number, product), found, dim=1)
        for layer, part in zip(self._layers(number, product), parts, strict=True):
            layer.known_output = part[None]

    def _layers(self, number: int, product: Product) -> list[HostLinear]:
        names = self._conversion.names(_weight(number, product))
        found = (self._module.get_submodule(name.removesuffix(".weight")) for name in names)
        return [cast(HostLinear, layer) for layer in found]


def _weight(number: int, product: Product) -> str:
    return OUTPUT if product == "output" else f"decoder.layers.{number}.{_WEIGHTS[product]}.weight"
