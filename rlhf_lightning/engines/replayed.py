"""Decoding steps on a GPU, recorded once for each number of rows and replayed as one piece of work.

Of a step of a small model the GPU waits nine tenths of the time for a processor to hand it the next kernel; a
graph of all of them is handed over at once. Steps are recorded for 8, 16, 32 ... rows, and one of fewer rows
computes the slots behind them too, which nobody has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rlhf_lightning.engines.cache import Cache
from rlhf_lightning.engines.decoder import Decoder
from rlhf_lightning.engines.kv_gpu import GPUDecode

_FEWEST = 8
"""Rows of the smallest graph: fewer take as long, since all weights are read."""


class Steps:
    """The steps of one generation.

    Args:
        decoder: what computes.
        cache: keys and values of all slots.
        places: [slots] int64, of the token to feed next; read anew in each step.
        tokens: [slots] int64, that token.
    """

    def __init__(self, decoder: Decoder, cache: Cache, *, places: Tensor, tokens: Tensor) -> None:
        self._decoder, self._cache, self._places, self._tokens = decoder, cache, places, tokens
        self._graphs: dict[int, Callable[[], Tensor | None]] = {}
        self._replays = decoder.replays
        self._met: set[int] = set()
        """Numbers of rows that were computed once: by then all kernels are loaded."""

    def __call__(self, count: int) -> Tensor | None:
        """Feed the slots 0..count-1: the logits [count, V], till the next call, on the rank that draws."""
        size = min(len(self._tokens), max(_FEWEST, 1 << (count - 1).bit_length())) if self._replays else count
        if self._replays and size in self._met and size not in self._graphs:
            self._record(size)
        logits = self._graphs.get(size, partial(self._compute, size))()
        self._met.add(size)
        return None if logits is None else logits[:count]

    def _record(self, size: int) -> None:
        try:
            self._graphs[size] = recorded(partial(self._compute, size))
        except RuntimeError as error:
            name = type(self._decoder).__name__
            warnings.warn(f"{name}: its steps cannot be recorded, and are slower: {error}", stacklevel=2)
            self._replays = False

    def _compute(self, size: int) -> Tensor | None:
        places = self._places[:size]
        output = self._decoder(
            input_ids=self._tokens[None, :size],
            position_ids=places[None],
            sequences=GPUDecode(self._cache, places),
            keep=None,
        )
        return None if output.logits is None else output.logits[0]


def recorded(compute: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
    """What computes the same again and again, from and to the same memory.

    Raises:
        RuntimeError: it waits for the GPU, or asks it for a number.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = compute()

    def replay() -> Tensor | None:
        graph.replay()
        return output

    return replay
