"""A tiny model, a PPO run on it, and the parameters that come out."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file
from transformers import LlamaConfig

from rlhf_lightning.algos import PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.running import KLPenalty
from rlhf_lightning.spec import EMBEDDED_DIRECTORY, OptimizerSpec, Sampling
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Critic, Reference, Reward
from tests.unit.algos.short import trainer

Parameters = Mapping[str, torch.Tensor]
Dtype = Literal["float32", "bfloat16"]
STEPS = 3
"""Iterations of the run that others are compared with."""
ROWS = 7
"""Prompts of an iteration: they divide by neither the devices nor the mini-batches."""
ENDS = tuple(range(40))
"""Tokens that end an answer: most of them are shorter than they may be, and rows differ in length."""
SCORES = {"length": 100.0}
"""What scores answers: an untrained model is right about nothing, and nothing would be learned from zeros."""


def write_tiny(directory: Path) -> None:
    """Write config.json of two layers, and the embedded tokenizer's files."""
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
        dtype="float32",
    ).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_DIRECTORY / name, directory / name)


class Export(Callback):
    """Writes the actor when training ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        pl_module.actor.export(directory=self.directory).fetch()


def ppo(path: Path, *, dtype: Dtype = "float32") -> PPO:
    """A fresh algorithm: two mini-batches of unequal size an iteration, and a KL coefficient that adapts."""
    optimizer = OptimizerSpec(lr=1e-4)
    sampling = Sampling(max_new_tokens=6, stop_token_ids=ENDS)
    return PPO(
        actor=Actor(path=str(path), dtype=dtype, optimizer=optimizer, sampling=sampling),
        critic=Critic(dtype=dtype, optimizer=optimizer),
        reference=Reference(dtype=dtype, decay=0.5),
        reward=Reward(functions=SCORES),
        mini_batch_size=4,
        kl=KLPenalty(target=1.0, horizon=100.0),
    )


def fit(
    algorithm: PPO,
    strategy: Strategy,
    root: Path,
    *,
    steps: int,
    callbacks: Sequence[Callback] = (),
    ckpt_path: str | None = None,
) -> Parameters:
    """Train for some iterations; return the actor's parameters."""
    exported = root / f"exported-{steps}"
    options = {"callbacks": [*callbacks, Export(exported)], "enable_checkpointing": bool(callbacks)}
    run = trainer(strategy, root, steps=steps, **options)
    data = TaskData(num_rows=3 * ROWS, num_val_rows=2, batch_size=ROWS)
    run.fit(algorithm, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return load_file(exported / "model.safetensors")


def furthest(first: Parameters, second: Parameters) -> float:
    """Largest difference of any parameter."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)
