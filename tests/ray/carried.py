"""A run with partial rollouts that keeps every batch and every version of the weights, and what has to hold.

n rows, P prompt width, R response width.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import OneStepOff
from rlhf_lightning.workers import Actor, Reward
from tests.unit.algos.short import trainer

SIZE, GROUP = 6, 2
"""Prompts of an iteration, and answers to each."""
EXACT = 1e-4
"""Largest difference of log-probabilities in float32: sums over other numbers of tokens, in another order."""
_COLUMNS = (
    *("row_ids", "group_ids", "prompt_ids", "prompt_mask", "response_ids", "response_mask"),
    *("rollout_log_probs", "weights_version", "last_version", "older_tokens", "num_tokens"),
)


class Watched(GRPO):
    """GRPO that keeps what it is given and what it has learned before."""

    directory: str = ""
    """For a Hugging Face directory a version."""
    batches: list[dict[str, Tensor]] = field(default_factory=list)
    """Columns of every iteration."""

    def step(self, batch: Batch) -> Metrics:
        self.actor.export(directory=Path(self.directory, str(1 + self.global_step))).fetch()
        return super().step(batch)

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        self.batches.append({name: batch[name] for name in _COLUMNS if name in batch})
        return super().compute_advantage(batch)


class Numbers(Callback):
    """Keeps the metrics of every iteration."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.seen.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def watched(model: Path | str, directory: Path) -> Watched:
    """Answers of 1 to 40 tokens, most of them few, and steps that are seen in every log-probability."""
    sampling = Sampling(max_new_tokens=40, stop_token_ids=tuple(range(24)))
    actor = Actor(path=str(model), optimizer=OptimizerSpec(lr=1e-3), sampling=sampling)
    reward = Reward(functions="length")  # an untrained model is right about nothing, and would not learn
    return Watched(actor=actor, reward=reward, group_size=GROUP, directory=str(directory))


def run(
    algorithm: Watched, strategy: OneStepOff, *, steps: int, ckpt_path: str | None = None
) -> list[dict[str, float]]:
    """Train, with a checkpoint `last.ckpt` after every iteration; the metrics of all of them."""
    numbers = Numbers()
    saving = ModelCheckpoint(dirpath=algorithm.directory, every_n_train_steps=1, save_last=True, save_top_k=0)
    saves: dict[str, object] = {"callbacks": [numbers, saving], "enable_checkpointing": True}
    fit = trainer(strategy, Path(algorithm.directory), steps=steps, **saves)
    data = TaskData(num_rows=5 * SIZE, num_val_rows=2, batch_size=SIZE)
    fit.fit(algorithm, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return numbers.seen


def check(batches: list[dict[str, Tensor]], metrics: list[dict[str, float]], bound: int) -> None:
    """Every row once, in whole groups, and none by weights older than the bound."""
    ids = [row for batch in batches for row in batch["row_ids"].tolist()]
    assert len(ids) == len(set(ids)) == SIZE * GROUP * len(batches)
    for version, (batch, numbers) in enumerate(zip(batches, metrics, strict=True), start=1):
        groups = batch["group_ids"].view(-1, GROUP)
        assert groups[:, 0].equal(groups[:, 1])
        staleness = version - int(batch["weights_version"].min())
        assert numbers["response/staleness"] == staleness <= bound
        older = batch["older_tokens"]
        assert numbers["response/carried"] == torch.tensor(float((older > 0).sum()) / len(older)).item()
        assert (batch["last_version"] > batch["weights_version"]).equal(older > 0)
        assert batch["response_mask"].sum(1).equal(batch["num_tokens"])
    assert max(numbers["response/staleness"] for numbers in metrics) == bound
    assert max(numbers["response/carried_tokens"] for numbers in metrics) > 0


def check_log_probs(algorithm: Watched) -> None:
    """Early tokens have the log-probabilities of the weights before, late ones those of the weights after."""
    apart: list[float] = []
    for batch in algorithm.batches:
        for row in (batch["older_tokens"] > 0).nonzero()[:, 0].tolist():
            first, last = int(batch["weights_version"][row]), int(batch["last_version"][row])
            assert last == first + 1  # with a bound of 2 there are no more
            old, new = (_judged(Path(algorithm.directory, str(v)), batch, row) for v in (first, last))
            length, before = int(batch["num_tokens"][row]), int(batch["older_tokens"][row])
            said = batch["rollout_log_probs"][row, :length]
            torch.testing.assert_close(said[:before], old[:before], atol=EXACT, rtol=0)
            torch.testing.assert_close(said[before:], new[before:], atol=EXACT, rtol=0)
            apart.append(float((old - new).abs().max()))
    assert len(apart) > 2
    assert max(apart) > 10 * EXACT


def _judged(directory: Path, batch: dict[str, Tensor], row: int) -> Tensor:
    """[length], the log-probabilities of an answer by a whole forward of one version."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    prompt = batch["prompt_ids"][row][batch["prompt_mask"][row]]
    response = batch["response_ids"][row][batch["response_mask"][row]]
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    chosen: Tensor = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
    return chosen
