"""A reference that is the base model of the actor's adapters on the same devices: no second copy of weights.

Each process registers its adapted models here, since a role is built without access to others on its device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn
from weakref import WeakValueDictionary

from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.fsdp.engine import FSDPEngine
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.engines.training import Part, TrainEngine
from rlhf_lightning.functional.aggregate import Counts, Loss
from rlhf_lightning.parallel import Seat
from rlhf_lightning.spec import ModelSpec

_adapted: WeakValueDictionary[Hashable, FSDPEngine] = WeakValueDictionary()
"""Adapted language models that train in this process, by the properties that a reference must share."""


def note_adapted(model: ModelSpec, engine: FSDPEngine, *, seat: Seat) -> None:
    """Register an adapted model, so that others on the same ranks can compute with its base model."""
    _adapted[_key(model, seat)] = engine


def unadapted(model: ModelSpec, *, seat: Seat) -> TrainEngine | None:
    """The model, if it is the base model of a registered one; None where it has to be loaded."""
    engine = _adapted.get(_key(model, seat))
    return None if engine is None else Unadapted(engine)


def _key(model: ModelSpec, seat: Seat) -> Hashable:
    group = None if seat.dp_group is None else id(seat.dp_group)
    return model.path, model.computes_in, seat.layout, str(seat.device), group


class Unadapted(TrainEngine):
    """An adapted model with its adapters switched off; it can only `infer`.

    Args:
        engine: the adapted model's.
    """

    def __init__(self, engine: FSDPEngine) -> None:
        self._engine = engine

    def infer(
        self, rows: TensorDict, *, temperature: float, entropy: bool = False, keep: bool = False
    ) -> TensorDict:
        """See `TrainEngine.infer`."""
        with self._engine.without_adapters():
            return self._engine.infer(rows, temperature=temperature, entropy=entropy)

    def accumulate(
        self, rows: TensorDict, loss: Loss, counts: Counts, *, temperature: float
    ) -> dict[str, Tensor]:
        """Never."""
        self._refuse()

    def optimizer_step(self) -> dict[str, float]:
        """Never."""
        self._refuse()

    def generating(self) -> AbstractContextManager[Decoder]:
        """Never."""
        self._refuse()

    def save(self, directory: Path) -> None:
        """Never: its directory has it."""
        self._refuse()

    def load(self, directory: Path) -> None:
        """Never."""
        self._refuse()

    def export(self, directory: Path) -> None:
        """Never: its directory has it."""
        self._refuse()

    def offload(self, parts: Iterable[Part]) -> None:
        """Let go of the weights that the adapted model has."""
        self._engine.offload([part for part in parts if part == "parameters"])

    def reload(self, parts: Iterable[Part]) -> None:
        """Bring the weights that the adapted model has."""
        self._engine.reload([part for part in parts if part == "parameters"])

    def away_bytes(self) -> int:
        """See `TrainEngine.away_bytes`; of all that the adapted model is, which is no less."""
        return self._engine.away_bytes()

    @property
    def lies_in(self) -> TrainEngine:
        """See `TrainEngine.lies_in`: the adapted model's."""
        return self._engine

    def _refuse(self) -> NoReturn:
        raise RuntimeError("the model below an actor's adapters is frozen and only computes log_probs.")
