"""Every training engine with every generation engine learns the same from the same answers."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from rlhf_lightning.algos import PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP, VLLM, ZeRO
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Critic, Reference, Reward, Settings
from tests.extras.generating import SMALL
from tests.extras.test_vllm_fit import write_model
from tests.unit.algos import small
from tests.unit.algos.short import trainer

STEPS = 3
TRAINING = {
    "fsdp": Settings(train=FSDP(max_tokens_per_micro_batch=64)),
    "zero-1": Settings(engine="zero", zero=ZeRO(stage=1)),
    "zero-2": Settings(engine="zero", zero=ZeRO(stage=2)),
    "zero-3": Settings(engine="zero", zero=ZeRO(stage=3)),
    "megatron": Settings(engine="megatron"),
}
Learned = dict[str, dict[str, Tensor]]
"""Weights of the trained models."""


class Keep(Callback):
    """Copies the weights at the end."""

    def __init__(self) -> None:
        self.weights: Learned = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Of the models that train, as their engines give them to others."""
        for name, role in small.built(pl_module).items():
            if role.trains:
                self.weights[name] = {key: value.clone() for key, value in role.engine.weights()}


def ppo(path: str) -> PPO:
    """The likeliest token is drawn, so that every engine gives the same answers."""
    optimizer = OptimizerSpec(lr=1e-3)
    return PPO(
        actor=Actor(path=path, optimizer=optimizer, sampling=Sampling(max_new_tokens=6, top_k=1)),
        critic=Critic(optimizer=optimizer),
        reference=Reference(),
        reward=Reward(functions="length"),
        mini_batch_size=3,
    )


def learned(path: str, settings: Settings) -> Learned:
    """After three iterations."""
    data = TaskData(batch_size=6, num_rows=18, num_val_rows=0)
    run = trainer(Local(settings=settings), Path(path), steps=STEPS, callbacks=[kept := Keep()])
    run.fit(ppo(path), datamodule=data)
    return kept.weights


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(path: str) -> Learned:
    return learned(path, Settings())


@pytest.mark.parametrize("generator", ["native", "vllm"])
@pytest.mark.parametrize("engine", TRAINING)
def test_the_weights_are_the_same(
    engine: str, generator: Literal["native", "vllm"], path: str, expected: Learned
) -> None:
    vllm = SMALL if generator == "vllm" else VLLM()  # options that nothing reads are refused
    settings = replace(TRAINING[engine], generator=generator, vllm=vllm)
    found = learned(path, settings)
    for _ in range(2):  # trainers are circles, and hold engines; then what they held
        gc.collect()
    assert found.keys() == expected.keys() == {"actor", "critic"}
    for role, weights in expected.items():
        for name, weight in weights.items():
            torch.testing.assert_close(found[role][name], weight, rtol=0, atol=1e-4)
