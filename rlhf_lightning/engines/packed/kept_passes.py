"""Forward passes kept for the update that follows, which saves one at the price of memory for activations.

values = infer(rows, keep=True)      keeps the autograd graphs of the first micro-batches
accumulate(rows, loss)               runs the backward pass on them: the same rows, the same weights
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.head import Asked
from rlhf_lightning.engines.packed.packing import COLUMNS, row_lengths
from rlhf_lightning.engines.packed.record import Record


class KeptPasses:
    """Outputs, with their autograd graphs, of some micro-batches of the rows that were last evaluated.

    Args:
        tokens: most tokens whose activations are kept.
        record: products of generations, which an update uses where no pass is kept.
    """

    def __init__(self, tokens: int, record: Record | None = None) -> None:
        self._tokens, self.record = tokens, record
        self._room, self._temperature = 0, 1.0
        self._rows: dict[str, Tensor] = {}
        self._outputs: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def begin(self, rows: TensorDict, *, temperature: float) -> None:
        """Forget what was kept, and keep passes over these rows from now on."""
        self.forget()
        if self._tokens:
            self._rows = {name: rows[name] for name in COLUMNS}
            self._room, self._temperature = self._tokens, temperature

    def admits(self, part: Mapping[str, Tensor]) -> bool:
        """Whether there is room for a micro-batch; if so, it is reserved."""
        if self._room <= 0:  # saves reading lengths from a GPU
            return False
        self._room -= sum(row_lengths(part["prompt_mask"], part["response_mask"]))
        return self._room >= 0

    def add(self, index: Sequence[int], outputs: dict[str, Tensor]) -> None:
        """Keep the outputs of these rows."""
        self._outputs[tuple(index)] = outputs

    def drop_others(self, rows: TensorDict, *, temperature: float) -> None:
        """Free the passes unless they are over these rows, on which an update begins."""
        same = self._outputs and self._temperature == temperature
        if not (same and all(torch.equal(column, rows[name]) for name, column in self._rows.items())):
            self.release()

    def pop(self, index: Sequence[int], *, asked: Asked) -> dict[str, Tensor] | None:
        """Hand over the kept outputs of these rows; None where they must be computed."""
        found = self._outputs.pop(tuple(index), None)
        if found is None or asked.candidates:
            return None
        if not asked.entropy:
            found.pop("entropy", None)
        return found

    def forget(self) -> None:
        """Free all that is kept, and the record."""
        self.release()
        if self.record is not None:
            self.record.forget()

    def release(self) -> None:
        """Free the passes."""
        self._rows.clear()
        self._outputs.clear()
