"""The native generator as a `GenerationEngine`: generates with the training engine's own weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.generation import GenerationEngine
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.engines.native.generator import NativeGenerator
from rlhf_lightning.engines.training import TrainEngine
from rlhf_lightning.parallel import Seat
from rlhf_lightning.spec import Sampling


class NativeEngine(GenerationEngine):
    """Generates natively, with the training engine's own weights."""

    def __init__(self, source: TrainEngine, *, seat: Seat, ends: Ends, config: Native) -> None:
        self.source: TrainEngine = source
        self._device, self._ends, self._config = seat.device, ends, config
        self._held: NativeGenerator | None = None
        """Over the decoder within `weights_held`."""

    def finished(
        self, rows: TensorDict, *, sampling: Sampling, seed: int, parts: int
    ) -> Iterator[tuple[Tensor, TensorDict]]:
        """See `GenerationEngine.finished`."""
        with self.weights_held():
            assert self._held is not None
            yield from self._held.finished(rows, sampling=sampling, seed=seed, parts=parts)

    def resume(
        self,
        rows: TensorDict,
        *,
        sampling: Sampling,
        seed: int,
        pause: Callable[[Tensor], bool],
        at_once: int = 0,
    ) -> TensorDict:
        """See `GenerationEngine.resume`."""
        if self._held is None:
            with self.weights_held():
                return self.resume(rows, sampling=sampling, seed=seed, pause=pause, at_once=at_once)
        return self._held.resume(rows, sampling=sampling, seed=seed, pause=pause, at_once=at_once)

    @contextmanager
    def weights_held(self) -> Iterator[None]:
        """See `GenerationEngine.weights_held`."""
        with self.source.generating() as decoder:
            self._held = NativeGenerator(decoder, device=self._device, ends=self._ends, config=self._config)
            del decoder  # must not outlive the context, which frees its tensors
            try:
                yield
            finally:
                self._held = None
