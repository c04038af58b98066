"""What of a batch of 256 x 512 tokens reaches the controller: the columns that the algorithm itself reads."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import pytest
import ray
import torch
from lightning.pytorch.callbacks import Callback
from transformers import LlamaConfig

from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Split
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor
from tests.unit.algos.short import trainer

ROWS, TOKENS = 256, 512
READ = {"response_mask": 1, "scores": 4, "values": 4, "log_probs": 4, "ref_log_probs": 4}
"""Columns [B, R] that `PPO.compute_advantage` reads, and the bytes of one of their numbers."""


class ChainThenPPO(PPO):
    """Chains remote calls in its first iteration, and is PPO in its second."""

    def step(self, batch: Batch) -> Metrics:
        if self.global_step:
            return super().step(batch)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.critic.compute_values(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.reward.compute_reward(batch)
        zeros = torch.zeros(ROWS, TOKENS)
        batch |= {"advantages": zeros, "returns": zeros}
        return self.critic.update_critic(batch, loss=self.value_loss) | self.actor.update_actor(
            batch, loss=self.policy_loss
        )


class Fetched(Callback):
    """Notes the bytes that each iteration brings to this process: as counted, and as pickled."""

    def __init__(self) -> None:
        self.pickled = 0
        self.counted: list[int] = []
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        self.counted.append(-self._counted(trainer))
        self.pickled = 0

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        self.counted[-1] += self._counted(trainer)
        self.seen.append(self.pickled)

    @staticmethod
    def _counted(trainer: pl.Trainer) -> int:
        transport = cast(Strategy, trainer.strategy).transport
        assert transport is not None
        return transport.fetched_bytes


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """Listen to everything that Ray hands to this process."""
    found, get = Fetched(), cast(Callable[..., object], ray.get)

    def listening(refs: object, *, timeout: float | None = None) -> object:
        value = get(refs, timeout=timeout)
        found.pickled += len(pickle.dumps(value))
        return value

    monkeypatch.setattr(ray, "get", listening)
    return found


def smallest(tiny: Path, directory: Path) -> Path:
    """A model of one narrow layer that has room for the prompts and 512 tokens."""
    for file in tiny.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = LlamaConfig.from_pretrained(tiny)
    config.update(
        {
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 1024,
        }
    )
    config.save_pretrained(directory)
    return directory


def test_only_what_the_algorithm_reads_is_fetched(tiny: Path, tmp_path: Path, fetched: Fetched) -> None:
    actor = Actor(path=str(smallest(tiny, tmp_path)), sampling=Sampling(max_new_tokens=TOKENS))
    run = trainer(Split(devices=2), tmp_path, steps=2, callbacks=[fetched])
    data = TaskData(num_rows=2 * ROWS, num_val_rows=0, batch_size=ROWS)
    run.fit(ChainThenPPO(actor=actor), datamodule=data)

    assert fetched.counted == [0, ROWS * (TOKENS * sum(READ.values()) + 1)]  # row_truncated, too
    few = 64_000
    assert fetched.seen[0] < few
    assert fetched.counted[1] <= fetched.seen[1] < fetched.counted[1] + few
