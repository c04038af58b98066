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
from rlhf_lightning.engines.native.kv_gpu import GPUDecode
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

    def __init__(
        self, means: Means, prompts: list[Prompt], sampling: Sampling, numbers: Tensor, *, most: int = 0
    ) -> None:
        super().__init__(means, prompts, sampling, numbers, most=most)
        self._nobody = len(prompts)
        self.state[0] = self._nobody
        self._graphed = GraphedSteps(self.decoder, slots=self.size, device=self.device)
        self._draws_within = self.texts is None and sampling.top_p == 1
        """Whether a graph draws, too; top-p and texts are looked at by the host in each step."""
        self._hosts = [torch.empty(self.size, dtype=torch.bool, pin_memory=True) for _ in range(2)]
        self._look: _Look | None = None

    def settle(self) -> None:
        """See `Slots.settle`; waits for the GPU."""
        look, self._look = self._look, None
        if look is not None:
            look.arrived.synchronize()
            self._end(look.occupants, look.ended.tolist(), look.steps)

    def _decode(self) -> None:
        """See `Slots._decode`."""
        logits = self._graphed(self._step, len(self.occupants))
        if not self._draws_within:
            self._next_token(logits, self.state[:, : len(self.occupants)])

    def _step(self, size: int) -> Tensor | None:
        """What a graph computes: the logits [size, V] of these slots."""
        state = self.state[:, :size]
        _, _, place, token = state
        logits = self.decoder(token, place, GPUDecode(self.cache, place))
        if self._draws_within:
            self._next_token(logits, state)
        return logits

    def _draw(self, logits: Tensor | None, state: Tensor) -> None:
        """See `Slots._draw`; marks the slots of rows that end with it as nobody's."""
        super()._draw(logits, state)
        row, column, _, token = state
        # Not `isin`, which waits for the GPU where there are many tokens to look for.
        ended = (token[:, None] == self.stops).any(1) | (column == self.sampling.max_new_tokens)
        if self.texts is not None:
            ended |= self._said(self.texts, state)
        ended |= row == self._nobody
        row.masked_fill_(ended, self._nobody)
        state[1:3].masked_fill_(ended, 0)

    def _retire(self) -> None:
        """Learn which rows ended before, and close up if steps get smaller."""
        look = self._sent()
        self.settle()
        self._look = look
        if all(occupant.ended or occupant.last <= self.steps for occupant in self.occupants):
            self.settle()
        left = max(1, self.size - self._free())
        if self._graphed.rows(left) < self._graphed.rows(len(self.occupants)):
            self._close_up()

    def _sent(self) -> _Look:
        """Send the host the slots that are nobody's now."""
        count = len(self.occupants)
        self._hosts.reverse()
        there = self._hosts[0][:count]
        there.copy_(self.state[0, :count] == self._nobody, non_blocking=True)
        arrived = torch.cuda.current_stream(self.device).record_event()
        return _Look(list(self.occupants), there, arrived, self.steps)

    def _close_up(self) -> None:
        count = len(self.occupants)
        super()._close_up()
        # A graph computes these slots, too: it reads little there, and drops what they draw.
        self.state[:3, len(self.occupants) : count] = self._tensor([self._nobody, 0, 0])[:, None]
