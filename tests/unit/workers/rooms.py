"""Three models on one device, whose bytes come and go as on a GPU, on a CPU too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch

from rlhf_lightning.controller import Batch, Remote, WorkerGroup
from rlhf_lightning.controller.device import Device, Placement
from rlhf_lightning.controller.in_process import InProcessTransport
from rlhf_lightning.controller.residents import GPUGauge, Residents
from rlhf_lightning.engines import PARTS, FSDPEngine
from rlhf_lightning.parallel import ParallelLayout, World
from rlhf_lightning.spec import LoRA, OptimizerSpec
from rlhf_lightning.workers import Actor, Critic, Reference, Role, Settings
from tests.unit.engines import tiny

T = TypeVar("T", bound=Role)
CPU = torch.device("cpu")
MODEL_BYTES = 300_000
"""Of the tiny model in float32, and a little more."""


class Held(GPUGauge):
    """What lies on a device of so many bytes, and the most that has."""

    def __init__(self, device: Device, size: int) -> None:
        super().__init__()
        self.device, self.size, self.before, self.most = device, size, 0, 0

    def here(self) -> int:
        sizes = [cast(Role, role).engine.memory() for role in self.device.roles.values()]
        return sum(size[part] for size in sizes for part in PARTS)

    def free_bytes(self) -> int:
        return self.size - self.here()

    def begin(self) -> None:
        self.before = self.here()

    def taken_bytes(self) -> int:
        self.most = max(self.most, self.here())
        return max(0, self.here() - self.before)


class Job:
    """An actor, its reference and a critic on one device, which learn for some iterations.

    Args:
        model: of all three.
        lora: of the actor, whose reference then shares its weights.
        gauge: of the device's memory; without one, one model is there at a time.
        offload: whether any goes at all.
        device: where they compute.
    """

    def __init__(
        self,
        model: Path,
        lora: LoRA | None,
        *,
        gauge: Callable[[Device], GPUGauge] | None,
        offload: bool = True,
        device: torch.device = CPU,
    ) -> None:
        self.device, self.came = Device(0), list[str]()
        self.device.offload = offload
        self.device.world = World(0, device, {(0,): None})
        self.gauge = None if gauge is None else gauge(self.device)
        self.device.residents = Residents(self.device.roles, self.gauge)
        optimizer = OptimizerSpec(lr=1e-3)
        actor = Actor(path=str(model), optimizer=optimizer, lora=lora, init_seed=0)
        self.actor = self.host("actor", actor)
        self.reference = self.host("reference", Reference().following(actor))
        self.critic = self.host("critic", Critic(optimizer=optimizer).following(actor).seeded(0))

    def host(self, name: str, role: T) -> T:
        """Build a role on the device; its handle."""
        layout = ParallelLayout()
        self.device.host(name, Placement(replace(role), layout, (0,), Settings()))
        self.watch(name, self.device.roles[name])
        return role.bound(WorkerGroup(name, InProcessTransport(self.device), layout, (0,)))

    def watch(self, name: str, role: Remote) -> None:
        """Let bytes move on this CPU too, and note whose come back."""
        engine = cast(Role, role).engine
        if not isinstance(engine, FSDPEngine):
            return
        engine._offloaded.frees = True
        reload = engine._offloaded.reload

        def counted(parts: tuple[str, ...]) -> None:
            self.came += [name] * (engine._offloaded.size_bytes > 0)
            reload(parts)  # type: ignore[arg-type]

        engine._offloaded.reload = counted  # type: ignore[method-assign, assignment]

    @staticmethod
    def rows() -> Batch:
        """Of every iteration."""
        return Batch.of({name: cast(torch.Tensor, column) for name, column in tiny.rows().items()})

    def iteration(self) -> list[torch.Tensor]:
        """What the models say, and how far they are from it."""
        rows = self.rows()
        said = [self.critic.compute_values(rows)["values"], self.actor.compute_log_prob(rows)["log_probs"]]
        said.append(self.reference.compute_ref_log_prob(rows)["ref_log_probs"])
        fit = tiny.Fit()
        learned = self.critic.update_critic(rows, loss=fit) | self.actor.update_actor(rows, loss=fit)
        numbers = learned.fetch()
        return [*said, torch.tensor([numbers[name] for name in sorted(numbers)])]

    def run(self) -> list[torch.Tensor]:
        """What three iterations say."""
        return [said for _ in range(3) for said in self.iteration()]

    def close(self) -> None:
        """Let the models go, which those of the next job would find."""
        self.device.roles.clear()
        gc.collect()
