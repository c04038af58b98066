"""The answers that a run learns from, on disk."""

from __future__ import annotations

import json
from dataclasses import field
from pathlib import Path

import pytest

from rlhf_lightning.algos import GRPO, PPO, SFT
from rlhf_lightning.callbacks import LastCheckpoint, Rollouts, SampleTable
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward
from tests.unit.algos.short import grpo, trainer

Lines = dict[str, list[dict[str, object]]]


class Noting(GRPO):
    """Keeps what was drawn."""

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        found = super().compute_advantage(batch)
        self.seen = batch["row_ids"].tolist(), batch["scores"].sum(dim=1).tolist(), batch["score_parts"]
        return found


def written(algorithm: GRPO, callback: Rollouts, root: Path, **options: object) -> Lines:
    run = trainer(Local(), root, steps=3, callbacks=[callback], **options)
    run.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=6, num_val_rows=0))
    assert algorithm.kept_rollouts is None
    files = sorted((root / "rollouts").glob("*"))
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def test_every_answer_and_what_it_is_worth(tmp_path: Path) -> None:
    reward = Reward(functions={"length": 1.0, "exact_match": 2.0})
    actor = Actor(sampling=Sampling(max_new_tokens=4))
    algorithm = Noting(actor=actor, reward=reward, group_size=2)
    found = written(algorithm, Rollouts(), tmp_path)
    assert list(found) == [f"step-00000{step}.jsonl" for step in (1, 2, 3)]
    ids, scores, parts = algorithm.seen
    last = found["step-000003.jsonl"]
    assert [line["row_id"] for line in last] == ids
    assert [line["score"] for line in last] == scores
    assert [line["scores"] for line in last] == [
        {"length": each[0], "exact_match": each[1]} for each in parts.tolist()
    ]
    assert len({str(line["prompt"]) for line in last}) == 2
    assert {line["step"] for line in last} == {3}
    assert all(isinstance(line["response"], str) for line in last)


class Styled(GRPO):
    """Has a second reward, which makes columns of the same names."""

    style: Reward = field(default_factory=lambda: Reward(functions=["too_long", "repetition"]))
    """Scores how an answer is written."""

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Score once more, and read nothing of it."""
        scores = batch["scores"]
        return super().compute_advantage(batch | self.style.compute_reward(batch) | {"scores": scores})


def test_parts_of_one_reward_do_not_pass_for_those_of_another(tmp_path: Path) -> None:
    reward = Reward(functions=["length", "exact_match"])
    algorithm = Styled(actor=Actor(sampling=Sampling(max_new_tokens=2)), reward=reward, group_size=2)
    found = written(algorithm, Rollouts(), tmp_path)
    logged = algorithm.trainer.callback_metrics
    assert "reward/mean" in logged
    assert "reward/length" not in logged
    assert "scores" not in found["step-000001.jsonl"][0]


def test_some_of_some_iterations(tmp_path: Path) -> None:
    found = written(grpo(), Rollouts(3, every_n_steps=2), tmp_path)
    assert {name: len(lines) for name, lines in found.items()} == {"step-000002.jsonl": 3}
    assert "scores" not in found["step-000002.jsonl"][0]
    assert len(written(grpo(), Rollouts(99), tmp_path)["step-000001.jsonl"]) == 4


class Sometimes(GRPO):
    """Learns in every other iteration, the first one included."""

    def step(self, batch: Batch) -> Metrics:
        return Metrics() if self.global_step % 2 else super().step(batch)


class Dropping(GRPO):
    """Has dropped every answer in every other iteration, the first one excluded."""

    def rollout_metrics(self, batch: Batch) -> dict[str, float]:
        return super().rollout_metrics(batch.take(range(0 if self.global_step % 2 else len(batch))))


@pytest.mark.parametrize("kind", [Sometimes, Dropping])
def test_an_iteration_without_answers_is_made_up_for_by_the_next_one(
    kind: type[GRPO], tmp_path: Path
) -> None:
    callback = Rollouts(every_n_steps=2)
    two = trainer(Local(), tmp_path, steps=2, callbacks=[callback])
    two.fit(grpo(kind), datamodule=TaskData(batch_size=2, num_rows=6, num_val_rows=0))
    assert list(written(grpo(kind), callback, tmp_path)) == ["step-000003.jsonl"], "none for the other run"


def test_a_run_that_goes_on_makes_up_for_the_iterations_before_its_checkpoint(tmp_path: Path) -> None:
    own = LastCheckpoint(tmp_path / "checkpoints")
    data = TaskData(batch_size=2, num_rows=6, num_val_rows=0)
    for steps, path in ((2, None), (3, own.path)):
        callbacks = [Rollouts(every_n_steps=2), own]
        run = trainer(Local(), tmp_path, steps=steps, enable_checkpointing=True, callbacks=callbacks)
        run.fit(grpo(Sometimes), datamodule=data, ckpt_path=path)
    assert [file.name for file in (tmp_path / "rollouts").iterdir()] == ["step-000003.jsonl"]


class Seldom(PPO):
    """Learns in every other iteration, and explains held-out answers after each."""

    def step(self, batch: Batch) -> Metrics:
        return Metrics() if self.global_step % 2 else super().step(batch)


def test_held_out_answers_are_not_those_of_an_iteration_that_learns_nothing(tmp_path: Path) -> None:
    algorithm = Seldom(actor=Actor(sampling=Sampling(max_new_tokens=2)), reward=Reward(functions=["length"]))
    callbacks = [Rollouts(), SampleTable(per_token=True)]
    options: dict[str, object] = {"limit_val_batches": 1, "val_check_interval": 1}
    run = trainer(Local(), tmp_path, steps=3, callbacks=callbacks, **options)
    run.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=6, num_val_rows=2))
    assert {file.name for file in (tmp_path / "rollouts").iterdir()} == {
        "step-000001.jsonl",
        "step-000003.jsonl",
    }


class Breaking(GRPO):
    """Breaks off once it has answered, and learns nothing in a second run."""

    broken = False

    def step(self, batch: Batch) -> Metrics:
        if not self.broken:
            super().step(batch)
            self.broken = True
            raise RuntimeError("broken off")
        return Metrics()


def test_the_answers_of_a_run_that_broke_off_are_not_those_of_the_next(tmp_path: Path) -> None:
    algorithm = grpo(Breaking)
    with pytest.raises(RuntimeError, match="broken off"):
        written(algorithm, Rollouts(), tmp_path)
    assert not written(algorithm, Rollouts(), tmp_path)


def test_the_answers_of_another_run_are_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = written(grpo(), Rollouts(), tmp_path)
    assert written(grpo(), Rollouts(every_n_steps=2), tmp_path, fast_dev_run=True) == first
    (tmp_path / "rollouts" / "mine.txt").write_text("stays")
    run = trainer(Local(), tmp_path, steps=3, callbacks=[Rollouts(every_n_steps=2)])
    run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=6, num_val_rows=0))
    assert sorted(file.name for file in (tmp_path / "rollouts").iterdir()) == [
        "mine.txt",
        "step-000002.jsonl",
    ]
    assert sorted(file.name for file in (tmp_path / "rollouts-v1").iterdir()) == list(first)
    assert (
        f"{tmp_path / 'rollouts'} holds answers of another run; they are in rollouts-v1 now." in caplog.text
    )


def test_trying_a_run_out_leaves_nothing(tmp_path: Path) -> None:
    assert not written(grpo(), Rollouts(), tmp_path, fast_dev_run=True)


@pytest.mark.parametrize(("rows", "every"), [(-1, 1), (1, 0)])
def test_what_cannot_be_is_refused(rows: int, every: int) -> None:
    with pytest.raises(ValueError, match=r"^Rollouts\(rows="):
        Rollouts(rows, every_n_steps=every)


def test_given_answers_are_not_drawn(tmp_path: Path) -> None:
    run = trainer(Local(), tmp_path, callbacks=[Rollouts()])
    with pytest.raises(ValueError, match="SFT learns from given answers"):
        run.fit(SFT(), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=0))
