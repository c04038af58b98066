"""The base model of an actor's adapters as the reference on the same devices: no second copy of weights.

A role is built without access to the other roles on its device, so each process registers its adapted models
here, and a reference looks for one with the same base model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import NoReturn
from weakref import WeakValueDictionary

from tensordict import TensorDict

from rlhf_lightning.engines.fsdp.engine import FSDPEngine
from rlhf_lightning.engines.head import PLAIN, Asked
from rlhf_lightning.engines.huggingface.source import is_fresh
from rlhf_lightning.engines.offload import PARTS, Part
from rlhf_lightning.engines.training import TrainEngine
from rlhf_lightning.parallel import Seat
from rlhf_lightning.spec import ModelSpec

_adapted: WeakValueDictionary[Hashable, FSDPEngine] = WeakValueDictionary()
"""Adapted language models that train in this process, by the properties that a reference must share."""


def register_adapted(model: ModelSpec, engine: FSDPEngine, *, seat: Seat) -> None:
    """Register an adapted model, so that a reference on the same ranks can compute with its base model."""
    _adapted[_key(model, seat)] = engine


def shared_base_model(model: ModelSpec, *, seat: Seat) -> TrainEngine | None:
    """An engine for the model, if it is the base model of a registered one; None: it must be loaded."""
    engine = _adapted.get(_key(model, seat))
    return None if engine is None else BaseModelEngine(engine)


def _key(model: ModelSpec, seat: Seat) -> Hashable:
    group = None if seat.dp_group is None else id(seat.dp_group)
    divided = replace(seat.layout, generation=None)  # a reference draws nothing
    seed = model.init_seed if is_fresh(model) else None  # weights from files are the same with any
    return model.path, model.computes_in, seed, divided, str(seat.device), group


class BaseModelEngine(TrainEngine):
    """An adapted model with its adapters switched off; it can only `infer`.

    Args:
        engine: of the adapted model.
    """

    def __init__(self, engine: FSDPEngine) -> None:
        self._engine = engine

    def infer(
        self, rows: TensorDict, *, temperature: float, asked: Asked = PLAIN, keep: bool = False
    ) -> TensorDict:
        """See `TrainEngine.infer`."""
        with self._engine.without_adapters():
            return self._engine.infer(rows, temperature=temperature, asked=asked)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError("the base model of an actor's adapters is frozen and only computes log_probs.")

    accumulate = optimizer_step = generating = save = load = export = _refuse

    def offload(self, parts: Iterable[Part]) -> None:
        """Offload the weights, which the adapted model shares."""
        self._engine.offload([part for part in parts if part == "parameters"])

    def reload(self, parts: Iterable[Part]) -> None:
        """Reload the weights, which the adapted model shares."""
        self._engine.reload([part for part in parts if part == "parameters"])

    def reload_bytes(self) -> int:
        """See `TrainEngine.reload_bytes`; counts all parts of the adapted model, which is an upper bound."""
        return self._engine.reload_bytes()

    def memory(self) -> dict[str, int]:
        """See `TrainEngine.memory`: zeros, as the adapted model counts what both compute with."""
        return dict.fromkeys((*PARTS, "host"), 0)

    @property
    def memory_owner(self) -> TrainEngine:
        """See `TrainEngine.memory_owner`: the adapted model's engine."""
        return self._engine
