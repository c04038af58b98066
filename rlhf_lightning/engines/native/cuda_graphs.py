"""Decoding steps on a GPU as CUDA graphs: captured once for each number of rows, then replayed.

In a step of a small model the GPU waits nine tenths of the time for the host to launch the next kernel; a
graph launches all of them at once. Graphs are captured for 32, 64, 128 ... rows. A step of fewer rows also
computes the slots behind them, which are nobody's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from rlhf_lightning.engines.native.decoder import Decoder

_FEWEST = 32
"""Rows of the smallest graph: fewer take as long, since every step reads all weights."""

_not_capturable = set[str]()
"""Types of models whose steps could not be captured in this process."""


class GraphedSteps:
    """The decoding steps of one generation."""

    def __init__(self, decoder: Decoder, *, slots: int, device: torch.device) -> None:
        self._decoder, self._slots = decoder, slots
        self._graphs: dict[int, Callable[[], Tensor | None]] = {}
        self._capture = GraphCapture(device)
        self._captures = decoder.capturable and decoder.config.model_type not in _not_capturable
        self._computed: set[int] = set()
        """Numbers of rows that were computed once without a graph: by then all kernels are loaded."""

    def __call__(self, compute: Callable[[int], Tensor | None], count: int) -> Tensor | None:
        """Compute a step of the slots 0..count-1.

        Args:
            compute: computes a step of so many slots, in the same memory each time, and returns the logits.
                It is not kept: if it held these steps in turn, both would outlive the generation.
            count: number of slots.

        Returns:
            The logits [count, V], valid until the next call, on the rank that draws; None on others.
        """
        size = self.rows(count) if self._captures else count
        step = partial(compute, size)
        if self._captures and size in self._computed and size not in self._graphs:
            self._capture_step(size, step)
        logits = self._graphs.get(size, step)()
        self._computed.add(size)
        return None if logits is None else logits[:count]

    def rows(self, count: int) -> int:
        """Rows of the graph that computes so many."""
        return min(self._slots, max(_FEWEST, 1 << (count - 1).bit_length()))

    def _capture_step(self, size: int, step: Callable[[], Tensor | None]) -> None:
        try:
            self._graphs[size] = self._capture.capture(step)
        except RuntimeError as error:
            self._captures, kind = False, self._decoder.config.model_type
            # What ends a failed capture may fail, too.
            if torch.OutOfMemoryError in {type(error), type(error.__context__)}:
                told = (
                    f"no memory was left to capture decoding steps of {kind} in a CUDA graph: those of this "
                    f"generation take longer ({error}). Try fewer strategy.settings.generate.slots."
                )
            else:
                told = (
                    f"decoding steps of {kind} cannot be captured in a CUDA graph, and take longer: {error}"
                )
                _not_capturable.add(kind)
            warnings.warn(told, stacklevel=2)


class GraphCapture:
    """Captures work on one device in CUDA graphs, which read and write the same memory at each replay.

    All graphs of a capture share memory for intermediate results: only one of them may run at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def capture(self, compute: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
        """Capture what `compute` does, without running it, and return a function that replays it.

        Raises:
            RuntimeError: `compute` waits for the GPU, or reads a number from it.
        """
        # Not `torch.cuda.graph`: it also frees torch's cache of pinned memory, which offloading uses, and
        # stays on its own stream where the capture fails.
        torch.cuda.synchronize(self._device)
        if self._pool is None:
            torch.cuda.empty_cache()  # frees the memory of the previous generation's graphs
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
    """The one stream for all captures on a device: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)
