"""`--trainer.deterministic true` reaches the devices, and two runs on two of them are equal bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import ONE_TO_ALL, register
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Colocated
from rlhf_lightning.workers import Actor, Critic
from tests.ranks.test_repeated import Noisy
from tests.ray.model import ROWS, STEPS, Export
from tests.unit.algos.short import trainer


@dataclass(frozen=True, kw_only=True)
class Asked(Actor):
    """An actor that says what its process was told."""

    @register(transfer=ONE_TO_ALL)
    def told(self) -> bool:
        """Whether operations are deterministic."""
        return torch.are_deterministic_algorithms_enabled()


class Asking(PPO):
    """PPO that asks its actor."""

    actor: Asked = field(default_factory=Asked)

    def on_train_start(self) -> None:
        self.answers = self.actor.told().fetch()


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Lightning sets it
    yield
    torch.use_deterministic_algorithms(False)


def learned(tiny: Path, root: Path) -> dict[str, torch.Tensor]:
    """Three iterations."""
    optimizer = OptimizerSpec(lr=1e-4)
    algorithm = Asking(
        actor=Asked(path=str(tiny), optimizer=optimizer, sampling=Sampling(max_new_tokens=6)),
        critic=Critic(optimizer=optimizer),
        policy_loss=Noisy(),
        mini_batch_size=4,
    )
    run = trainer(Colocated(devices=2), root, steps=STEPS, deterministic=True, callbacks=[Export(root)])
    run.fit(algorithm, datamodule=TaskData(num_rows=3 * ROWS, num_val_rows=2, batch_size=ROWS))
    assert algorithm.answers == [True, True]
    return load_file(root / "model.safetensors")


def test_two_runs_on_two_devices_are_equal(cluster: str, tiny: Path, tmp_path: Path) -> None:
    first, second = (learned(tiny, tmp_path / name) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
