"""The rows that a native generator decodes: slots of keys and values, packed prefill, continuous refill.

    waiting prompts --prefill, several at once--> slots 0..n-1 --one forward a token--> responses
                                                    ^ a finished row's slot goes to the last row: no holes, so
                                                      the cost of a step follows the rows still decoded

B is the number of rows, R the width of the responses (`max_new_tokens`), n the rows decoded now, V the size
of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.ends import Ends, StopTexts
from rlhf_lightning.engines.host_linear import MANY_TOKENS
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.engines.native.decoder import Decoder, Drawn
from rlhf_lightning.engines.native.kv import Decode, Prefill
from rlhf_lightning.engines.native.responses import Responses
from rlhf_lightning.engines.packed.attention import Packed
from rlhf_lightning.engines.packed.record import Record
from rlhf_lightning.engines.prompts import Prompt
from rlhf_lightning.engines.sampling import sample
from rlhf_lightning.spec import Sampling


@dataclass(slots=True)
class Occupant:
    """The row that is decoded in a slot, as the host knows it without reading from the device."""

    row: int
    start: int
    """Position of the token to feed next, less the number of decoding steps so far."""
    last: int
    """Number of decoding steps after which the row has `max_new_tokens` tokens."""
    ended: bool = False
    """Whether the row is finished, and its slot nobody's."""


def capacity_of(prompts: Sequence[Prompt], sampling: Sampling) -> int:
    """Tokens that a slot must hold for any of these rows; the last token of a response is never fed."""
    return max(map(len, prompts), default=1) + sampling.max_new_tokens - 1


@dataclass(frozen=True, kw_only=True)
class Means:
    """What rows are decoded with."""

    decoder: Decoder
    device: torch.device
    ends: Ends
    """What ends a response."""
    config: Native


class Slots:
    """The rows being decoded: the cache's slots 0..n-1 and the state of each.

    Args:
        means: what rows are decoded with.
        prompts: of all B rows, which wait at first.
        sampling: how tokens are drawn.
        numbers: [B + 1, R] float64, what they are drawn with; the last row is nobody's.
        most: rows decoded at once; 0: all.
    """

    def __init__(
        self, means: Means, prompts: list[Prompt], sampling: Sampling, numbers: Tensor, *, most: int = 0
    ) -> None:
        self.config, self.decoder, self.device = means.config, means.decoder, means.device
        self.prompts, self.sampling, self.numbers = prompts, sampling, numbers
        rows, ends = len(prompts), means.ends
        self.responses = Responses(rows, sampling.max_new_tokens, ends.pad_token_id, self.device)
        self.waiting, self.said = deque(range(rows)), [0] * rows
        """`said`: response tokens that each row had from the start; they are appended to its prompt."""
        self.size = min(most or rows, rows)
        self.cache = Cache(self.size, capacity_of(prompts, sampling), dtype=self.config.dtype)
        self.state = torch.zeros(4, self.size, dtype=torch.int64, device=self.device)
        """[4, slots]: row, column of its next token, position of the token to feed, that token."""
        self.occupants, self.ended, self.steps = list[Occupant](), list[int](), 0
        """`ended`: finished rows, in the order in which they ended; `steps`: decoding steps so far."""
        self.stops = self._tensor(ends.tokens(sampling))
        self.texts = ends.texts(sampling)
        self.record = self._recorded()

    def _recorded(self) -> Record | None:
        """The record of this generation's products, if there is one; nobody learns from greedy answers."""
        record = self.decoder.record
        if record is None or self.sampling.temperature == 0:
            return None
        fits = record.begin([len(prompt) for prompt in self.prompts], self.sampling.max_new_tokens)
        return record if fits else None

    def end_record(self) -> None:
        """Close the record once all rows are finished, so that updates can look rows up."""
        if self.record is None or self.occupants or self.waiting:
            return
        ids, lengths = self.responses.ids.numpy(), self.responses.lengths.tolist()
        whole = [np.append(prompt, ids[row, : lengths[row]]) for row, prompt in enumerate(self.prompts)]
        self.record.end([tokens[:-1] for tokens in whole])

    def go_on(self, rows: TensorDict) -> None:
        """Continue responses that rows have already, as returned by `begun`; before any row gets a slot."""
        self.responses.begin(rows)
        said, ids = self.responses.lengths.tolist(), rows["response_ids"].cpu().numpy()
        self.prompts = [np.append(p, row[:n]) for p, row, n in zip(self.prompts, ids, said, strict=True)]
        self.said = said
        self.waiting = deque((~rows["ended"]).nonzero()[:, 0].tolist())

    def pause(self) -> None:
        """Store the response lengths of the rows that are still being decoded; after `settle`."""
        for occupant in self.occupants:
            if not occupant.ended:
                self.responses.lengths[occupant.row] = self._length(occupant, self.steps)

    def settle(self) -> None:
        """Have all rows in `ended` that ended in the steps so far; here they always are."""

    def _length(self, occupant: Occupant, steps: int) -> int:
        return self.sampling.max_new_tokens - (occupant.last - steps)

    @torch.no_grad()
    def advance(self) -> None:
        """Prefill waiting rows if enough slots are free, else decode one token per row."""
        if self.waiting and self._free() >= min(self.config.refill, self.size, len(self.waiting)):
            self._close_up()
            seated = len(self.occupants)
            logits = self._prefill(self._next_rows())
            self._draw(logits, self.state[:, seated : len(self.occupants)])
        else:
            self._decode()
            self.steps += 1
        self._retire()

    def _draw(self, logits: Tensor | None, state: Tensor) -> None:
        """Draw the next token of some slots, whose state [4, n] is changed in place."""
        row, column, _, token = state
        drawn = None if logits is None else Drawn(*sample(logits, self.numbers[row, column], self.sampling))
        token[:], log_prob = self.decoder.share(drawn, len(row))
        self.responses.record(row, column, token, log_prob)
        column += 1

    def _free(self) -> int:
        """Number of slots that nobody has."""
        return self.size - sum(not occupant.ended for occupant in self.occupants)

    def _next_rows(self) -> list[int]:
        """The rows to prefill: as many as there are slots for and the token budget allows, at least one."""
        rows: list[int] = []
        tokens, free = 0, self._free()
        most = min(self.config.prefill_tokens, MANY_TOKENS - 1 if self.record else 2**40)
        while self.waiting and len(rows) < free:
            tokens += len(self.prompts[self.waiting[0]])
            if rows and tokens > most:
                break
            rows.append(self.waiting.popleft())
        return rows

    def _prefill(self, rows: list[int]) -> Tensor | None:
        """Give slots to rows and return the logits [rows, V] of first tokens; equal prompts run once."""
        distinct: dict[bytes, int] = {}
        which = [distinct.setdefault(self.prompts[row].tobytes(), len(distinct)) for row in rows]
        prompts = [np.frombuffer(prompt, dtype=np.int64) for prompt in distinct]
        packed = Packed([len(prompt) for prompt in prompts], device=self.device)
        ends = np.cumsum(packed.lengths)
        prefill = self._seat(rows, [int(ends[prompt]) for prompt in which], packed)
        ids = self._tensor(np.concatenate(prompts))
        last = self._tensor(ends - 1)
        logits = self.decoder(ids, packed.position_ids[0], prefill, keep=last)
        if logits is None or len(distinct) == len(rows):
            return logits
        return logits.index_select(0, self._tensor(which))

    def _seat(self, rows: list[int], ends: list[int], packed: Packed) -> Prefill:
        """Give the next slots to these rows, whose prompts end at `ends` of the pack."""
        lengths = [len(self.prompts[row]) for row in rows]
        first = len(self.occupants)
        said = [self.said[row] for row in rows]
        self.state[:3, first : first + len(rows)] = self._tensor([rows, said, lengths])
        last = self.steps + self.sampling.max_new_tokens - 1
        self.occupants += [
            Occupant(row, length - self.steps, last - before)
            for row, length, before in zip(rows, lengths, said, strict=True)
        ]
        slot = np.repeat(np.arange(first, first + len(rows)), lengths)
        position = np.concatenate([np.arange(n) for n in lengths])
        tokens = np.concatenate([np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)])
        source = self._tensor(tokens) if len(slot) > sum(packed.lengths) else None
        if self.record is not None and sum(packed.lengths) < MANY_TOKENS:
            self.record.note(*map(self._tensor, (np.repeat(rows, lengths), position, tokens)))
        where = {"slot": self._tensor(slot), "position": self._tensor(position)}
        return Prefill(packed, self.cache, source=source, **where)

    def _decode(self) -> None:
        """Feed the last token of every row and draw the next."""
        state = self.state[:, : len(self.occupants)]
        row, _, place, token = state
        starts = [occupant.start for occupant in self.occupants]
        shortest, longest = min(starts) + self.steps, max(starts) + self.steps
        decode = Decode(self.cache, place, shortest=shortest, longest=longest)
        if self.record is not None and len(row) < MANY_TOKENS:
            self.record.note(row, place, torch.arange(len(row)))
        self._next_token(self.decoder(token, place, decode), state)

    def _next_token(self, logits: Tensor | None, state: Tensor) -> None:
        """Draw the next token of slots that were fed the last, which stands one place before it."""
        state[2] += 1
        self._draw(logits, state)

    def _retire(self) -> None:
        """Retire rows that drew an end or have all their tokens."""
        never = not len(self.stops) and self.texts is None
        last = [occupant.last <= self.steps for occupant in self.occupants]
        if never and not any(last):
            return
        stopped = torch.isin(self.state[3, : len(last)], self.stops)
        if self.texts is not None:
            stopped |= self._said(self.texts, self.state[:, : len(last)])
        self._end(self.occupants, [a or b for a, b in zip(stopped.tolist(), last, strict=True)], self.steps)
        self._close_up()

    def _end(self, occupants: Sequence[Occupant], ended: Sequence[bool], steps: int) -> None:
        """Note the rows that are found to have ended after a number of steps."""
        for occupant in compress(occupants, ended):
            if not occupant.ended:
                occupant.ended = True
                self.ended.append(occupant.row)
                self.responses.lengths[occupant.row] = self._length(occupant, steps)

    def _close_up(self) -> None:
        """Let rows from the last slots fill those that nobody has."""
        done = [occupant.ended for occupant in self.occupants]
        kept = done.count(False)
        holes = [slot for slot in range(kept) if done[slot]]
        movers = [slot for slot in range(kept, len(done)) if not done[slot]]
        if holes:
            source, target = self._tensor(movers), self._tensor(holes)
            longest = max(self.occupants[slot].start for slot in movers) + self.steps
            self.cache.move(source, target, longest)
            self.state[:, target] = self.state[:, source]
            for slot, hole in zip(movers, holes, strict=True):
                self.occupants[hole] = self.occupants[slot]
        del self.occupants[kept:]

    def _said(self, texts: StopTexts, state: Tensor) -> Tensor:
        """[n] bool, which of some slots' responses now end with a stop text; `state` is [4, n]."""
        row, column, _, token = state
        found = torch.zeros_like(token, dtype=torch.bool)
        for slot in texts.may_end(token).nonzero()[:, 0].tolist():
            said = self.responses.ids[row[slot], : column[slot]]
            found[slot] = texts.ended(said.tolist())
        return found

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device)
