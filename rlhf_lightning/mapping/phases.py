"""What the models of a run did in an iteration: its seconds, measured and predicted.

A method is predicted as its number of calls x the seconds of one, by the simulators of training, scoring, or
transition and generation. An iteration is predicted as HybridFlow's d_cost (Algorithm 1), and a fixed time
for every remote call: d_cost is the sum over generation, preparation and training of the slowest pool's
seconds, which are the sum over its models.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_lightning.mapping import memory, simulate
from rlhf_lightning.mapping.dataflow import PHASES, Kind
from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import Generation, ParallelLayout


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One method of one model, all its calls of an iteration together."""

    role: str
    """Name of the algorithm's field."""
    method: str
    """Such as `update_actor`."""
    kind: Kind
    """What it asks of the model."""
    calls: int
    """How often it was called."""
    seconds: float
    """Measured inside the slowest device, all calls together."""
    devices: tuple[int, ...]
    """Devices of the model's pool."""
    shape: ModelShape
    """Sizes of the model."""
    layout: ParallelLayout
    """How it is divided over its ranks."""
    workload: Workload
    """The work of one call."""
    rescored: bool = False
    """Whether a generation is followed by a pass of the training engine over the answers."""

    @property
    def name(self) -> str:
        """`role.method`, as the metrics call it."""
        return f"{self.role}.{self.method}"

    def predict(self, hardware: Hardware) -> float:
        """Seconds inside the devices, all calls together, without sending requests and collecting answers."""
        at = (hardware, self.shape, self.layout, self.workload)
        if self.kind == "train":
            parts = [simulate.train(*at)]
        elif self.kind == "generate":
            parts = [self._generation(hardware)]
        else:
            parts = []
        if self.kind == "infer" or self.rescored:
            parts.append(simulate.infer(*at))
        seconds = sum(part.seconds - hardware.overhead.call for part in parts)
        if self.kind == "generate":
            seconds += simulate.transition(*at).seconds
        return self.calls * seconds

    def _generation(self, hardware: Hardware) -> simulate.Estimate:
        """A generation with room for all rows that the engine admits, within its limit: it reserves them."""
        at = (self.shape, self.layout, self.workload)
        limit = memory.kv_limit(*at, device=hardware.memory_bytes) or math.inf  # it ran: there was room
        room = min(memory.kv_needed(*at), limit) * (1 + 1e-9)
        return simulate.generate(hardware, *at, kv_bytes=room)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Phase:
        """The inverse of `dataclasses.asdict`, also after a way through JSON.

        Raises:
            KeyError, TypeError, ValueError: the values are not those of a phase.
        """
        layout, workload = dict(values["layout"]), dict(values["workload"])
        if layout.get("generation"):
            layout["generation"] = Generation(**layout["generation"])
        workload["lengths"] = tuple(workload["lengths"])
        rebuilt = {
            "devices": tuple(values["devices"]),
            "shape": ModelShape(**values["shape"]),
            "layout": ParallelLayout(**layout),
            "workload": Workload(**workload),
        }
        return cls(**{**values, **rebuilt})


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration of a run."""

    step: int
    """Its number, counted from 1."""
    seconds: float
    """Measured from the batch to the logged metrics."""
    calls: int
    """Remote calls over rows, those of functions included; one to all ranks of a model counts once."""
    phases: tuple[Phase, ...]
    """The methods that ran a model."""

    def predict(self, hardware: Hardware) -> float:
        """Predicted seconds of the whole iteration; see the head of the module."""
        stages = self._stages([phase.predict(hardware) for phase in self.phases])
        return stages + self.calls * hardware.overhead.call

    @property
    def call_overhead(self) -> float:
        """Measured seconds of each remote call that no model's work accounts for."""
        rest = self.seconds - self._stages([phase.seconds for phase in self.phases])
        return max(0.0, rest / max(1, self.calls))

    def _stages(self, seconds: Sequence[float]) -> float:
        """Seconds of all stages together (d_cost), from the seconds of each phase."""
        spent: defaultdict[str, defaultdict[tuple[int, ...], float]] = defaultdict(lambda: defaultdict(float))
        for phase, value in zip(self.phases, seconds, strict=True):
            spent[PHASES[phase.kind]][phase.devices] += value
        return sum(max(pools.values()) for pools in spent.values())

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Iteration:
        """The inverse of `dataclasses.asdict`.

        Raises:
            KeyError, TypeError, ValueError: the values are not those of an iteration.
        """
        return cls(**{**values, "phases": tuple(Phase.of(phase) for phase in values["phases"])})
