"""PPO with vLLM as its generator: all that a user types is --strategy.settings.generator vllm."""

from __future__ import annotations

import gc
import math
import shutil
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoConfig

from rlhf_lightning.algos import PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines.vllm.engine import VLLMEngine
from rlhf_lightning.spec import EMBEDDED_DIRECTORY, OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Critic, Reference, Settings
from tests.extras.generating import SMALL
from tests.unit.algos import small
from tests.unit.algos.short import trainer

FAST = OptimizerSpec(lr=1e-3)


def write_model(directory: Path, *, head_dim: int = 32) -> str:
    """The configuration of a model of two layers, and the embedded tokenizer."""
    config = AutoConfig.from_pretrained(EMBEDDED_DIRECTORY)
    config.num_hidden_layers, config.layer_types, config.head_dim = 2, None, head_dim
    config.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_DIRECTORY / name, directory / name)
    return str(directory)


def ppo(path: str) -> PPO:
    actor = Actor(path=path, optimizer=FAST, sampling=Sampling(max_new_tokens=6), recompute_log_probs=True)
    return PPO(actor=actor, critic=Critic(optimizer=FAST), reference=Reference())


def data() -> TaskData:
    return TaskData(batch_size=6, num_rows=24, num_val_rows=0)


class Watch(small.Keep):
    """Notes what generates, and with which weights."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[int | None] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Look at the actor on its worker."""
        super().on_train_batch_end(trainer, pl_module)
        actor = small.built(pl_module)["actor"]
        assert isinstance(actor, Actor)
        assert isinstance(actor.generator, VLLMEngine)
        self.versions.append(actor.generator.version)


def test_ppo_learns_from_what_vllm_says(tmp_path: Path) -> None:
    watch, strategy = Watch(), Local(settings=Settings(generator="vllm", vllm=SMALL))
    trainer(strategy, tmp_path, steps=2, callbacks=[watch]).fit(ppo(write_model(tmp_path)), datamodule=data())
    assert len(watch.numbers) == 2
    assert watch.versions == [0, 1]
    for numbers in watch.numbers:
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert abs(numbers["actor/mismatch_kl"]) < 1e-6, numbers
    moved = [(watch.weights["actor"][n] - w).abs().max() for n, w in watch.first["actor"].items()]
    assert float(torch.stack(moved).max()) > 1e-5
    gc.collect()  # a role and its engine know each other; what they hold ends with them


def test_a_model_that_vllm_does_not_take_is_refused_before_anything_starts(tmp_path: Path) -> None:
    settings = Settings(generator="vllm", vllm=replace(SMALL, max_num_seqs=4))
    with pytest.raises(ValueError, match="heads are 16 wide, and on a CPU vLLM takes 32"):
        small.run(ppo(write_model(tmp_path, head_dim=16)), data(), settings=settings)
