"""The costs of a dataflow's models on a cluster, by the simulators: what HybridFlow calls simu."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_lightning.mapping import memory, simulate
from rlhf_lightning.mapping.dataflow import Dataflow, Work
from rlhf_lightning.mapping.estimate import Estimate
from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.mapping.partitions import divisors
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import Generation, ParallelLayout

WAVES = (1.0, 8 / 7, 4 / 3, 8 / 5, *range(2, 17), 20, 24, 32, 48, 64, 96, 128, 256)
"""A generation engine has room for the keys and values of 1 / w of its rows: w is one of these."""
Allows = Callable[[ParallelLayout, int], bool]
"""Whether an engine's options take a layout for a model of so many layers."""


@dataclass(frozen=True)
class _Known:
    """A model and what it has to do."""

    shape: ModelShape
    recipe: Workload
    """How it computes; rows and updates are those of each piece of work."""
    work: tuple[tuple[Work, ...], ...]
    """By stage."""
    workloads: Mapping[Work, Workload]
    """The workload of each piece of work, for the simulators."""

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(work.kind for stage in self.work for work in stage)


@dataclass(frozen=True)
class _Profile:
    """What one model costs in one layout."""

    resident: float
    """Bytes per device; see `Costs.resident`."""
    working: float
    """Bytes per device; see `Costs.working`."""
    fixed: tuple[float, ...]
    """Seconds in each stage that do not depend on free memory, the transition to generation included."""
    generations: tuple[tuple[int, int], ...]
    """Places in `_Known.work`, stage and number, of the generations, whose seconds depend on free memory."""


class SimulatedCosts:
    """`Costs` by the simulators; results are cached by `signature`, so that equal models are simulated once.

    Args:
        hardware: the cluster.
        dataflow: of the algorithm.
        shapes: sizes of the models: of those that it calls, and of others that are placed all the same.
        workload: of an iteration; rows and updates are taken from the dataflow.
        recipes: the workload of each role whose model computes in another way.
        allows: which layouts the engine's options take.
    """

    def __init__(
        self,
        hardware: Hardware,
        dataflow: Dataflow,
        shapes: Mapping[str, ModelShape],
        *,
        workload: Workload,
        recipes: Mapping[str, Workload] | None = None,
        allows: Allows = lambda _layout, _layers: True,
    ) -> None:
        self.hardware, self.dataflow, self.workload = hardware, dataflow, workload
        self.shapes, self.recipes = dict(shapes), dict(recipes or {})
        self.allows = allows
        self.roles = (*dataflow.roles, *(role for role in shapes if role not in dataflow.roles))
        """The models: those that work, then those that no step calls, which take memory alone."""
        self._models = {role: self._know(role, shapes[role]) for role in self.roles}
        self._signatures: dict[str, Hashable] = {}
        self._generations: dict[Hashable, Estimate] = {}
        self._profiles: dict[Hashable, _Profile] = {}
        self._rooms: dict[Hashable, tuple[float, float]] = {}

    def _know(self, role: str, shape: ModelShape) -> _Known:
        models = ([w for w in s.work if w.kind != "function"] for s in self.dataflow.stages)
        stages = tuple(tuple(w for w in work if w.role == role) for work in models)
        recipe = self.recipes.get(role, self.workload)
        every = {work: self._workload(recipe, work) for stage in stages for work in stage}
        return _Known(shape, recipe, stages, every)

    @staticmethod
    def _workload(recipe: Workload, work: Work) -> Workload:
        """The workload of a piece of work: one pass over its rows; of training, an update for each call."""
        updates = work.calls if work.kind == "train" else 1
        return replace(recipe, batch=max(work.rows, updates), mini_batches=updates)

    def _at(
        self, role: str, layout: ParallelLayout, work: Work | None = None
    ) -> tuple[ModelShape, ParallelLayout, Workload]:
        """What simulators take, in their order; the workload of a piece of work, or else the recipe."""
        known = self._models[role]
        if work is None:
            return known.shape, layout, known.recipe
        return known.shape, layout, known.workloads.get(work) or self._workload(known.recipe, work)

    @property
    def undivided(self) -> str:
        """The first model that the Megatron engine does not take, and why; empty where it takes all."""
        found = ((role, shape.undivided) for role, shape in self.shapes.items() if shape.undivided)
        return next((f"{role} has {why}" for role, why in found), "")

    @property
    def only_replicas(self) -> bool:
        """Whether no model may have tensor shards or pipeline stages."""
        two = ParallelLayout(t=2), ParallelLayout(p=2)
        return not any(self._takes(shape, layout) for shape in self.shapes.values() for layout in two)

    def _takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        """Whether the engine takes a model in a layout."""
        whole = layout.p * layout.t == 1
        return (whole or not self.undivided) and self.allows(layout, shape.layers)

    @property
    def capacity(self) -> float:
        """Bytes of a device that tensors can take."""
        return self.hardware.usable_bytes

    @property
    def elastic(self) -> frozenset[str]:
        """The roles that generate."""
        return frozenset(role for role, known in self._models.items() if "generate" in known.kinds)

    def signature(self, role: str) -> Hashable:
        """Shape, recipe and work, without names."""
        if role not in self._signatures:
            known = self._models[role]
            work = tuple(tuple((w.kind, w.rows, w.calls) for w in stage) for stage in known.work)
            self._signatures[role] = (replace(known.shape, name=""), known.recipe, work)
        return self._signatures[role]

    def layouts(self, role: str, devices: int) -> Sequence[ParallelLayout]:
        """Tensor shards in a node that divide a model, equal stages, replicas with rows, as `allows` says.

        A replica has rows of the largest piece of work, and takes part in smaller ones without. Where they
        divide the weights among them, more replicas make room.
        """
        known = self._models[role]
        shape, divided = known.shape, known.recipe.sharding == "full"
        rows = max((w.batch // w.mini_batches for w in known.workloads.values()), default=devices)
        widest = math.gcd(devices, self.hardware.gpus_per_node, shape.heads)
        found: list[ParallelLayout] = []
        for t in filter(shape.divides, divisors(widest)):
            for p in divisors(math.gcd(devices // t, shape.layers)):
                train = ParallelLayout(p=p, t=t, d=devices // (p * t))
                if (divided or train.d <= rows) and self._takes(shape, train):
                    found += self._generating(role, train)
        return found

    def _generating(self, role: str, train: ParallelLayout) -> Sequence[ParallelLayout]:
        """The training layout with every generation's, if the model generates: pg divides p, tg divides t."""
        if role not in self.elastic:
            return [train]
        stages = [1] if self.workload.one_stage else divisors(train.p)
        shards = [tg for tg in divisors(train.t) if self._models[role].shape.divides(tg)]
        return [replace(train, generation=Generation(pg, tg)) for pg in stages for tg in shards]

    def resident(self, role: str, layout: ParallelLayout) -> float:
        """Bytes that stay while other models compute."""
        return self._profile(role, layout).resident

    def working(self, role: str, layout: ParallelLayout) -> float:
        """Bytes beside all residents while the model computes; of a generation with room for one sequence."""
        return self._profile(role, layout).working

    def seconds(self, role: str, layout: ParallelLayout, free: float) -> Sequence[float]:
        """Seconds in each stage; the transition to generation belongs to the stage of the generation."""
        profile, own = self._profile(role, layout), self._models[role].work
        seconds = list(profile.fixed)
        for stage, i in profile.generations:
            seconds[stage] += self.estimate(role, layout, own[stage][i], free).seconds
        return seconds

    def _profile(self, role: str, layout: ParallelLayout) -> _Profile:
        key = (self.signature(role), layout)
        if key not in self._profiles:
            self._profiles[key] = self._make_profile(role, layout)
        return self._profiles[key]

    def _make_profile(self, role: str, layout: ParallelLayout) -> _Profile:
        known = self._models[role]
        fixed = [0.0] * len(known.work)
        generations = []
        for stage, every in enumerate(known.work):
            for i, work in enumerate(every):
                if work.kind == "generate":
                    generations.append((stage, i))
                    fixed[stage] += self.transition(role, layout).seconds
                else:
                    fixed[stage] += self.estimate(role, layout, work, 0.0).seconds
        _, resident = self._footprint(role, layout)
        peaks = (self._peak(role, layout, work) for work in known.workloads)
        working = max(peaks, default=resident) - resident
        return _Profile(resident, working, tuple(fixed), tuple(generations))

    def _footprint(self, role: str, layout: ParallelLayout) -> tuple[float, float]:
        """Bytes of the model itself while it computes, and while another model does."""
        at, trained = self._at(role, layout), "train" in self._models[role].kinds
        return memory.footprint(*at, trained=trained).total, memory.resting(*at, trained=trained).total

    def used(self, role: str, layout: ParallelLayout, work: Work, free: float) -> float:
        """Bytes of the model while it does a piece of work; a generation uses what is free, or its share."""
        if work.kind == "generate":
            own = self.resident(role, layout) + self._room(role, layout, work)[0]
            if self._models[role].recipe.reserves:
                return own + self._limit(role, layout)
            return own + self.kv_bytes(role, layout, work, free)
        return self._peak(role, layout, work)

    def _peak(self, role: str, layout: ParallelLayout, work: Work) -> float:
        at, (whole, resident) = self._at(role, layout, work), self._footprint(role, layout)
        if work.kind == "generate":
            buffers, one = self._room(role, layout, replace(work, rows=1))
            return resident + buffers + one
        if work.kind == "train":
            return memory.training(*at).total
        scoring = memory.inference(*at)
        return whole + scoring.activations + scoring.buffers

    def _room(self, role: str, layout: ParallelLayout, work: Work) -> tuple[float, float]:
        """Bytes that a generation needs beside what is resident; bytes of keys and values of all its rows."""
        key = (self.signature(role), layout, work.rows)
        if key not in self._rooms:
            at, (whole, resident) = self._at(role, layout, work), self._footprint(role, layout)
            self._rooms[key] = memory.generation(*at).total + whole - resident, memory.kv_needed(*at)
        return self._rooms[key]

    def kv_bytes(self, role: str, layout: ParallelLayout, work: Work, free: float) -> float:
        """Bytes for keys and values: of all rows, or of the largest share 1 / w of `WAVES` that fits."""
        needed, left = self._room(role, layout, work)[1], self._left(role, layout, work, free)
        # Slightly more than the share, so that rounding does not cost a sequence.
        needed *= 1 + 1e-9
        return next((needed / wave for wave in WAVES if needed / wave <= left), 0.0)

    def _left(self, role: str, layout: ParallelLayout, work: Work, free: float) -> float:
        """Bytes of the free ones that the engine gives keys and values; 0 where it does not start."""
        left, limit = free - self._room(role, layout, work)[0], self._limit(role, layout)
        if not self._models[role].recipe.reserves:
            return min(left, limit)
        return limit if left >= limit * (1 - 1e-8) else 0.0

    def _limit(self, role: str, layout: ParallelLayout) -> float:
        """Most bytes that the engine gives keys and values; slightly more, for rounding as in `kv_bytes`."""
        limit = memory.kv_limit(*self._at(role, layout), device=self.hardware.memory_bytes)
        return limit * (1 + 1e-9)

    def rows_at_once(self, role: str, layout: ParallelLayout, work: Work, free: float) -> int:
        """Rows of a replica that a generation decodes at once; 0: all of them."""
        left = self._left(role, layout, work, free)
        return memory.rows_at_once(*self._at(role, layout, work), free=left)

    def _generate(self, role: str, layout: ParallelLayout, work: Work, kv_bytes: float) -> Estimate:
        key = (self.signature(role), layout, work.rows, kv_bytes)
        if key not in self._generations:
            at = self._at(role, layout, work)
            self._generations[key] = simulate.generate(self.hardware, *at, kv_bytes=kv_bytes)
        return self._generations[key]

    def transition(self, role: str, layout: ParallelLayout) -> Estimate:
        """The transition from the training layout to that of generation."""
        return simulate.transition(self.hardware, *self._at(role, layout))

    def estimate(self, role: str, layout: ParallelLayout, work: Work, free: float) -> Estimate:
        """The prediction of one piece of work, without the transition."""
        if work.kind == "generate":
            return self._generate(role, layout, work, self.kv_bytes(role, layout, work, free))
        run = simulate.train if work.kind == "train" else simulate.infer
        return run(self.hardware, *self._at(role, layout, work))

    def work(self, role: str) -> Sequence[Sequence[Work]]:
        """What the model does in each stage."""
        return self._models[role].work
