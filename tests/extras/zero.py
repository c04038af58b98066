"""Engines on DeepSpeed in processes of their own, and the FSDP engine that they are to equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - seconds, which each rank would take
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines import FSDP, FSDPEngine, Head, TrainEngine, ZeRO
from rlhf_lightning.engines.deepspeed.engine import ZeROEngine
from rlhf_lightning.engines.head import Asked
from rlhf_lightning.parallel import ModelGroups, ParallelLayout, Seat
from rlhf_lightning.spec import ModelSpec
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Fit

STEPS, BUDGET = 3, 20


def seat(group: dist.ProcessGroup) -> Seat:
    """Of this rank, in a model on all ranks."""
    layout = ParallelLayout(d=group.size())
    return Seat(group.rank(), layout, torch.device("cpu"), None, ModelGroups.create_all(layout))


def settings(stage: int, **options: int) -> ZeRO:
    """Small micro-batches, and nothing that stage 3 keeps whole."""
    made: Callable[..., ZeRO] = ZeRO
    return made(stage=stage, **{"max_tokens_per_micro_batch": BUDGET, "whole_below": 0, **options})


def zero(
    group: dist.ProcessGroup, spec: ModelSpec, stage: int, *, head: Head = "lm", **options: int
) -> ZeROEngine:
    """An engine on all ranks."""
    return ZeROEngine(spec, head=head, seat=seat(group), config=settings(stage, **options))


def fsdp(spec: ModelSpec, *, head: Head = "lm") -> FSDPEngine:
    """The engine to equal, on one device."""
    return FSDPEngine(spec, head=head, config=FSDP(max_tokens_per_micro_batch=BUDGET))


def own(group: dist.ProcessGroup) -> TensorDict:
    """The rows of this rank: all others' too many."""
    return tiny.rows()[group.rank() :: group.size()]


@dataclass
class Trained:
    """What an engine said and became."""

    outputs: dict[str, Tensor]
    """Before the first step."""
    metrics: dict[str, float]
    """Of the last step, of this rank's rows."""
    reports: list[dict[str, float]]
    weights: Tensor


def train(engine: TrainEngine, *portions: TensorDict) -> Trained:
    """Evaluate the rows, then step; the gradients of all portions add up before each step."""
    rows = cast(TensorDict, torch.cat(cast(list[Tensor], [*portions])))
    found = engine.infer(rows, temperature=0.7, asked=Asked(entropy=True, likeliest=3))
    reports: list[dict[str, float]] = []
    metrics: dict[str, float] = {}
    for _ in range(STEPS):
        metrics = {}
        for portion in portions:
            for name, value in step_into(engine, portion).items():
                metrics[name] = metrics.get(name, 0.0) + value
        reports.append(engine.optimizer_step())
    outputs = {str(name): found[str(name)] for name in found.keys()}  # noqa: SIM118 - it iterates over rows
    return Trained(outputs, metrics, reports, engine.give_weights())


def step_into(engine: TrainEngine, rows: TensorDict) -> dict[str, float]:
    """Accumulate; the metrics."""
    loss = Fit(needs_entropy=engine._head == "lm")  # type: ignore[attr-defined]
    metrics = engine.accumulate(rows, loss, tiny.counts(), temperature=0.7)
    return {name: float(value) for name, value in metrics.items()}


def step(engine: TrainEngine, rows: TensorDict) -> dict[str, float]:
    """One step."""
    step_into(engine, rows)
    return engine.optimizer_step()
