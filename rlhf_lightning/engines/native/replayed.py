"""Decoding steps on a GPU, recorded once for each number of rows and replayed as one piece of work.

Of a step of a small model the GPU waits nine tenths of the time for a processor to hand it the next kernel; a
graph of all of them is handed over at once. Steps are recorded for 8, 16, 32 ... rows, and one of fewer rows
computes the slots behind them too, which nobody has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.engines.native.decoder import Decoder, logits_of
from rlhf_lightning.engines.native.kv_gpu import GPUDecode

_FEWEST = 8
"""Rows of the smallest graph: fewer take as long, since all weights are read."""

_refused = set[str]()
"""Kinds of models whose steps could not be recorded in this process."""


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
        self._recorder = Recorder(tokens.device)
        self._replays = decoder.replays and decoder.config.model_type not in _refused
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
            self._graphs[size] = self._recorder.record(partial(self._compute, size))
        except RuntimeError as error:
            kind = self._decoder.config.model_type
            warnings.warn(
                f"steps of {kind} cannot be recorded for the GPU, and take longer: {error}", stacklevel=2
            )
            _refused.add(kind)
            self._replays = False

    def _compute(self, size: int) -> Tensor | None:
        places = self._places[:size]
        return logits_of(self._decoder, self._tokens[:size], places, GPUDecode(self._cache, places))


class Recorder:
    """Records work on one device, to be replayed from and to the same memory.

    What is made on the way shares memory between recordings: only one of them computes at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def record(self, compute: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
        """What replays what is called once here, without anything being computed.

        Raises:
            RuntimeError: it waits for the GPU, or asks it for a number.
        """
        # Not `torch.cuda.graph`: it also gives pinned memory back, which models that make room go through,
        # and stays on its stream where the recording fails.
        torch.cuda.synchronize(self._device)
        if self._pool is None:
            torch.cuda.empty_cache()  # what recordings of the generation before have left
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_side_stream(self._device)):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = compute()
            finally:
                graph.capture_end()
        self._pool = graph.pool()

        def replay() -> Tensor | None:
            graph.replay()
            return output

        return replay


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that everything is recorded on: cuBLAS keeps memory for each."""
    return torch.cuda.Stream(device)
