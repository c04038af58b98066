"""A GPU's slots: the host hands over a step before it knows which rows ended in the last one.

    host | step 1 | step 2 | who ended in 1? | step 3 | who ended in 2? | ...
    GPU           | step 1                   | step 2                   | step 3      without a pause

The GPU itself marks the slot of a row that ended as nobody's: what it draws from then on is dropped. The rows
close up where a smaller graph can then compute them, and before prompts come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_lightning.engines.native.cuda_graphs import GraphedSteps
from rlhf_lightning.engines.native.kv_gpu import GPUCache
from rlhf_lightning.engines.native.slots import Means, Occupant, Slots
from rlhf_lightning.engines.prompts import Prompt
from rlhf_lightning.spec import Sampling


@dataclass(frozen=True)
class _Look:
    """Which rows had ended after a step, on its way from the GPU."""

    occupants: Sequence[Occupant]
    """Of the slots, then."""
    ended: Tensor
    """[n] bool, in pinned memory."""
    arrived: torch.cuda.Event
    steps: int


class GPUSlots(Slots):
    """See the head of the module; the arguments are those of `Slots`."""

    def __init__(self, means: Means, prompts: list[Prompt], sampling: Sampling, *, most: int = 0) -> None:
        super().__init__(means, prompts, sampling, most=most)
        _, _, places, tokens = self.state
        self._graphed = GraphedSteps(self.decoder, self.cache, places=places, tokens=tokens)
        self._nobody = len(prompts)
        self._look: _Look | None = None
        self._hosts = [torch.empty(self.size, dtype=torch.bool, pin_memory=True) for _ in range(2)]

    def _cache(self, capacity: int) -> GPUCache:
        return GPUCache(self.size, capacity, dtype=self.config.dtype)

    def settle(self) -> None:
        """See `Slots.settle`; waits for the GPU."""
        look, self._look = self._look, None
        if look is not None:
            look.arrived.synchronize()
            self._end(look.occupants, look.ended.tolist(), look.steps)

    def _step(self) -> Tensor | None:
        return self._graphed(len(self.occupants))

    def _retire(self) -> None:
        """Mark the slots of rows that end now, learn of those before, and close up if steps get smaller."""
        look = self._marked()
        self.settle()
        self._look = look
        if all(occupant.ended or occupant.last <= self.steps for occupant in self.occupants):
            self.settle()
        left = max(1, self.size - self._free())
        if self._graphed.rows(left) < self._graphed.rows(len(self.occupants)):
            self._close_up()

    def _marked(self) -> _Look:
        state = self.state[:, : len(self.occupants)]
        row, column, _, token = state
        ended = torch.isin(token, self.stops) | (column == self.sampling.max_new_tokens)
        if self.texts is not None:
            ended |= self._said(self.texts)
        ended |= row == self._nobody
        row.masked_fill_(ended, self._nobody)
        state[1:3].masked_fill_(ended, 0)
        self._hosts.reverse()
        there = self._hosts[0][: len(row)]
        there.copy_(ended, non_blocking=True)
        arrived = torch.cuda.current_stream(self.device).record_event()
        return _Look(list(self.occupants), there, arrived, self.steps)

    def _close_up(self) -> None:
        count = len(self.occupants)
        super()._close_up()
        self.state[2, len(self.occupants) : count] = 0  # a graph computes these slots too: let it read little
