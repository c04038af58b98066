"""What an algorithm refuses before anything is placed."""

from __future__ import annotations

import json
from dataclasses import field
from pathlib import Path

import lightning.pytorch as pl
import pytest

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Critic, Reference, Reward
from tests.unit.algos.small import write_model


class Unjudged(RLHFAlgorithm):
    """Answers, and has nothing that scores answers."""

    actor: Actor = field(default_factory=lambda: Actor(sampling=Sampling(max_new_tokens=2)))

    def step(self, batch: Batch) -> Metrics:
        """Answer only."""
        self.actor.generate_sequences(batch)
        return Metrics()


class InItsOwnWay(Unjudged):
    """Validates without scores."""

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Nothing."""


class Started(Local):
    """Fails once it is to start."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse."""
        raise RuntimeError("started")


def refusal(algorithm: RLHFAlgorithm, root: Path, *, held_out: int = 2, limit: int | None = None) -> str:
    run = pl.Trainer(
        strategy=Started(),
        logger=False,
        limit_val_batches=limit,
        default_root_dir=root,
        enable_checkpointing=False,
    )
    with pytest.raises((ValueError, RuntimeError)) as error:
        run.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=held_out))
    return str(error.value)


def test_held_out_answers_need_a_reward(tmp_path: Path) -> None:
    told = refusal(Unjudged(), tmp_path)
    assert told.startswith("Unjudged has no field `reward: Reward`, which scores held-out answers.")


def write_other(directory: Path, words: int) -> str:
    """A model whose tokenizer numbers the bytes otherwise, but for some of the first."""
    write_model(directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    moved = tokens[:words] + tokens[: words - 1 : -1]
    tokenizer["model"]["vocab"] = {token: number for number, token in enumerate(moved)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(directory)


@pytest.mark.parametrize("role", ["critic", "reward", "reference"])
def test_another_tokenizer_is_refused(role: str, tmp_path: Path) -> None:
    path = write_other(tmp_path / "other", 2)
    other = {"critic": Critic(path=path), "reward": Reward(path=path), "reference": Reference(path=path)}
    told = refusal(PPO(**{role: other[role]}), tmp_path)  # type: ignore[arg-type]
    assert told.startswith(
        f"{role}.path={path!r}: reads the token ids of 'embedded', and its tokenizer knows"
    )


def test_the_same_tokenizer_elsewhere_and_none_are_taken(tmp_path: Path) -> None:
    assert refusal(PPO(critic=Critic(path=write_model(tmp_path / "same"))), tmp_path) == "started"
    path = write_model(tmp_path / "without")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (Path(path) / file).unlink()
    assert refusal(PPO(critic=Critic(path=path)), tmp_path) == "started"


def test_without_held_out_rows_none_is_needed(tmp_path: Path) -> None:
    assert refusal(Unjudged(), tmp_path, held_out=0) == "started"
    assert refusal(Unjudged(), tmp_path, limit=0) == "started"
    assert refusal(InItsOwnWay(), tmp_path) == "started"
