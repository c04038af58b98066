"""PPO with adapters learns the same wherever the models stand, and whoever has the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from rlhf_lightning.algos import PPO
from rlhf_lightning.engines import FSDP, FSDPEngine
from rlhf_lightning.spec import LoRA, ModelSpec, OptimizerSpec
from rlhf_lightning.strategies import Colocated, Local, OpenRLHF
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Reference, Settings
from tests.ray.model import STEPS, Parameters, fit, furthest, ppo

OTHERS: dict[str, Callable[[], Strategy]] = {
    "two copies of two shards": lambda: Colocated(
        devices=4, settings=Settings(train=FSDP(shard=2)), offload=True
    ),
    "separate generator": lambda: OpenRLHF(devices=4),
}


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with weights."""
    directory = tmp_path_factory.mktemp("whole")
    FSDPEngine(ModelSpec(path=str(tiny), init_seed=0)).export(directory)
    return directory


def adapted(path: Path) -> PPO:
    """PPO as in other tests, with adapters on the actor; its reference stays."""
    algorithm = ppo(path)
    lora, optimizer = LoRA(rank=4), OptimizerSpec(lr=1e-3)
    algorithm.actor = replace(algorithm.actor, lora=lora, optimizer=optimizer)
    algorithm.reference = Reference()
    return algorithm


@pytest.fixture(scope="module")
def alone(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    """Three iterations in this process."""
    return fit(adapted(whole), Local(), tmp_path_factory.mktemp("alone"), steps=STEPS)


class Weigh(Callback):
    """Bytes of the reference's own weights on each of its devices, wherever they are."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        self.held = [sum(parts.values()) for parts in pl_module.reference.memory().fetch()]


@pytest.mark.parametrize("name", OTHERS)
def test_the_merged_parameters_are_the_same(
    alone: Parameters, name: str, cluster: str, whole: Path, tmp_path: Path
) -> None:
    weigh = Weigh()
    found = fit(adapted(whole), OTHERS[name](), tmp_path, steps=STEPS, callbacks=[weigh])
    assert furthest(alone, found) < 1e-5
    assert weigh.held
    assert all(held == 0 for held in weigh.held) == name.startswith("two copies"), weigh.held


def test_it_learned(alone: Parameters, whole: Path) -> None:
    fresh = dict(FSDPEngine(ModelSpec(path=str(whole))).weights())
    assert furthest(alone, {name: fresh[name] for name in alone}) > 1e-3
