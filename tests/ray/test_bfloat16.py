"""Whole runs of models that compute in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors.torch import load_file

from rlhf_lightning.commands import export
from rlhf_lightning.engines import FSDP
from rlhf_lightning.engines.huggingface.models import load_causal_lm
from rlhf_lightning.parallel import Generation
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.strategies import Colocated, HybridEngine3D, OneStepOff
from rlhf_lightning.strategies.hybrid3d import Parallel3D
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Settings
from tests.ray.model import STEPS, fit, furthest, ppo

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "replicas": lambda: Colocated(devices=2, offload=True),
    "sharded": lambda: Colocated(devices=2, settings=Settings(train=FSDP(shard=2))),
    "megatron": lambda: HybridEngine3D(parallel=Parallel3D(t=2, generate=Generation(1, 1)), devices=2),
    "a generator apart": OneStepOff,
}


class Numbers(Callback):
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Of an iteration."""
        self.logged.append({name: float(number) for name, number in trainer.logged_metrics.items()})


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_learns_with_masters_in_float32(name: str, tiny: Path, tmp_path: Path) -> None:
    algorithm, numbers = ppo(tiny, dtype="bfloat16"), Numbers()
    fresh: dict[str, torch.Tensor] = load_causal_lm(ModelSpec(path=str(tiny))).state_dict()
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    learned = fit(algorithm, STRATEGIES[name](), tmp_path, steps=STEPS, callbacks=[numbers, saving])
    assert {weight.dtype for weight in learned.values()} == {torch.bfloat16}
    assert all(math.isfinite(number) for logged in numbers.logged for number in logged.values())
    whole = {n: weight.float() for n, weight in learned.items()}
    rounded = {n: fresh[n].bfloat16().float() for n in whole}
    assert furthest(whole, rounded) > 1e-4
    export.run([str(tmp_path / "last.ckpt"), str(tmp_path / "later")])
    later: dict[str, torch.Tensor] = load_file(tmp_path / "later" / "model.safetensors")
    assert later.keys() == learned.keys()
    assert all(torch.equal(weight, learned[n]) for n, weight in later.items())
