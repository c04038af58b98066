"""Whole runs of models that compute in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor

from rlhf_lightning.commands import export
from rlhf_lightning.engines import FSDP, FSDPEngine
from rlhf_lightning.parallel import Generation
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.strategies import Colocated, HybridEngine3D, Local, OpenRLHF
from rlhf_lightning.strategies.hybrid3d import Parallel3D
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Settings
from tests.ray.model import STEPS, Parameters, fit, ppo

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "replicas": lambda: Colocated(devices=2, settings=Settings(train=FSDP(shard=1)), offload=True),
    "sharded": lambda: Colocated(devices=2, settings=Settings(train=FSDP(shard=2))),
    "megatron": lambda: HybridEngine3D(parallel=Parallel3D(t=2, generate=Generation(1, 1)), devices=2),
    "a generator apart": OpenRLHF,
}


class Numbers(Callback):
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.logged.append({name: float(number) for name, number in trainer.logged_metrics.items()})


def learned(tiny: Path, strategy: Strategy, root: Path) -> tuple[Parameters, Tensor, Numbers]:
    """What a run exports, its float32 weights as they are saved, and its numbers."""
    algorithm, numbers = ppo(tiny, dtype="bfloat16"), Numbers()
    algorithm.actor = replace(algorithm.actor, recompute_log_probs=True)
    saving = ModelCheckpoint(dirpath=root, save_last=True)
    exported = fit(algorithm, strategy, root, steps=STEPS, callbacks=[numbers, saving])
    engine = FSDPEngine(ModelSpec(path=str(tiny)))
    engine.load(root / "last.ckpt" / "actor", trained=False)
    return exported, engine.give_weights(), numbers


@pytest.fixture(scope="module")
def alone(cluster: str, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """How far one device moves the weights."""
    return learned(tiny, Local(), tmp_path_factory.mktemp("alone"))[1] - fresh(tiny)


def fresh(tiny: Path) -> Tensor:
    """The weights before, in float32."""
    return FSDPEngine(ModelSpec(path=str(tiny), init_seed=0)).give_weights()


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_learns_with_masters_in_float32(name: str, alone: Tensor, tiny: Path, tmp_path: Path) -> None:
    """As one device does but for rounding, and by answers of the weights that it has."""
    exported, masters, numbers = learned(tiny, STRATEGIES[name](), tmp_path)
    moved = masters - fresh(tiny)
    assert all(math.isfinite(number) for logged in numbers.logged for number in logged.values())
    assert all(0 < logged["actor/mismatch_kl"] < 1e-5 for logged in numbers.logged)
    assert float((moved - alone).norm()) < 0.1 * float(alone.norm())
    assert not torch.equal(masters, masters.bfloat16().float())
    assert {weight.dtype for weight in exported.values()} == {torch.bfloat16}
    export.run([str(tmp_path / "last.ckpt"), str(tmp_path / "later")])
    later: dict[str, torch.Tensor] = load_file(tmp_path / "later" / "model.safetensors")
    assert later.keys() == exported.keys()
    assert all(torch.equal(weight, exported[n]) for n, weight in later.items())
