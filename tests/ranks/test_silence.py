"""What would go wrong in silence: calls a batch ahead, checkpoints too late, steps without rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import DPO, GRPO
from rlhf_lightning.controller import GROUPS, ORIGINS, Batch, Caller, Metrics
from rlhf_lightning.controller.register import Method, methods_of
from rlhf_lightning.data import PreferenceData, PromptData, TaskData
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local, OneStepOff
from rlhf_lightning.workers import Actor, Reference, Reward
from tests.unit.algos.short import grpo, trainer
from tests.unit.algos.small import Keep, Weights, write_model, write_rows
from tests.unit.algos.small import run as fitted


class Several(Caller):
    """Takes every call, and answers with what it was given."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        return batch


def ahead_of(algorithm: RLHFAlgorithm, *roles: str) -> tuple[OneStepOff, Mapping[str, Caller]]:
    """A strategy that is a batch ahead, in a step of a fit, and what receives the calls on the roles."""
    strategy = OneStepOff()
    strategy.connect(algorithm)
    callers = strategy.callers({name: Several() for name in (*roles, "actor", "generator")})
    assert strategy.generation is not None
    strategy.generation.is_validating = lambda: False
    algorithm._current_fx_name = "training_step"
    return strategy, callers


def generate(caller: Caller, batch: Batch, **arguments: object) -> Batch:
    return cast(Batch, caller.call(methods_of(Actor)["generate_sequences"], batch, arguments))


def test_a_step_that_asks_twice_cannot_be_a_batch_ahead() -> None:
    """Whatever the number of rows of the second call."""
    strategy, callers = ahead_of(grpo())
    rows = Batch.of({"row_ids": torch.arange(4)})
    for _ in range(2):
        generate(callers["actor"], rows)
        generate(callers["actor"], rows, greedy=True)
        strategy.after_step()
    strategy.after_step()
    generate(callers["actor"], rows)
    with pytest.raises(
        ValueError, match=r"^generate_sequences: it is called a second time .* count.* openrlhf,.*`older: Opp"
    ):
        generate(callers["actor"], rows.take([0, 1]))


class Playing(GRPO):
    """Beside the actor, one that answers the same prompts."""

    opponent: Actor = field(default_factory=Actor)


def test_an_actor_that_answers_at_once_comes_after_one_that_is_a_batch_ahead() -> None:
    strategy, callers = ahead_of(Playing(), "opponent")
    for first in (0, 4):
        rows = Batch.of({"row_ids": torch.arange(first, first + 4)})
        mine = generate(callers["actor"], rows)
        theirs = generate(callers["opponent"], mine)
        assert theirs["row_ids"].tolist() == mine["row_ids"].tolist()
        strategy.after_step()
    theirs = generate(callers["opponent"], rows).renamed({"row_ids": "their_ids"})
    generate(callers["actor"], rows | theirs)  # what it said goes along
    strategy.after_step()
    generate(callers["opponent"], rows | {"turn": torch.zeros(4)})
    generate(callers["opponent"], rows)
    several = rows | dict.fromkeys((GROUPS, ORIGINS), rows["row_ids"])
    for same in (rows, several, rows | {"turn": torch.zeros(4)}):
        with pytest.raises(ValueError, match=r"^generate_sequences: opponent has answered this batch before"):
            generate(callers["actor"], same)
        strategy.after_step()
        generate(callers["opponent"], rows | {"turn": torch.zeros(4)})
        generate(callers["opponent"], rows)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end", "validation_step"])
def test_what_hooks_had_answered_is_no_batch_of_a_step(hook: str) -> None:
    algorithm = Playing()
    _, callers = ahead_of(algorithm, "opponent")
    rows = Batch.of({"row_ids": torch.arange(4)})
    algorithm._current_fx_name = hook
    generate(callers["opponent"], rows)
    algorithm._current_fx_name = "training_step"
    assert generate(callers["actor"], rows)["row_ids"].tolist() == [0, 1, 2, 3]
    assert "opponent" not in ahead_of(algorithm)[1], "where a validation does not call it"


def test_functions_of_a_source_that_no_row_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[dict[str, object]] = [{"prompt": "p", "data_source": name} for name in ("maths", "code")]
    data = PromptData(path=write_rows(tmp_path / "rows.jsonl", rows), batch_size=2)
    for sources in (("maths",), ("math", "code")):
        judge = Reward(functions="length", by_source={name: {"length": 2.0} for name in sources})
        algorithm = GRPO(actor=Actor(sampling=Sampling(max_new_tokens=1)), reward=judge, group_size=2)
        trainer(Local(), tmp_path).fit(algorithm, datamodule=data)
        assert ("reward.by_source: no row is of math; there are code, maths." in caplog.text) == (
            "math" in sources
        )


def test_a_checkpoint_after_the_run_is_refused_and_replaces_nothing(tmp_path: Path) -> None:
    run = trainer(Local(), tmp_path)
    saving = ModelCheckpoint(tmp_path, filename="good")
    run.callbacks.append(saving)  # type: ignore[attr-defined]
    run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))
    good = Path(saving.best_model_path)
    held = sorted(path.name for path in good.iterdir())
    assert "actor" in held
    with pytest.raises(RuntimeError, match=r"good\.ckpt: the run has ended, and actor with its devices"):
        run.save_checkpoint(good)
    assert sorted(path.name for path in good.iterdir()) == held


class Following(GRPO):
    """With a reference that is kept."""

    reference: Reference = field(default_factory=lambda: Reference(decay=0.5))


def test_models_of_a_checkpoint_that_nobody_takes_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {name: getattr(grpo(), name) for name in ("actor", "reward", "group_size")}
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=0)
    run = trainer(Local(), tmp_path)
    saving = ModelCheckpoint(tmp_path, filename="followed")
    run.callbacks.append(saving)  # type: ignore[attr-defined]
    run.fit(Following(**options), datamodule=data)
    trainer(Local(), tmp_path, steps=2).fit(grpo(), datamodule=data, ckpt_path=tmp_path / "followed.ckpt")
    assert "followed.ckpt: holds reference too, which this algorithm does not keep" in caplog.text


class Duel(GRPO):
    """Two actors of one model."""

    rival: Actor = field(default_factory=Actor)


def test_two_actors_draw_each_their_own() -> None:
    duel = Duel(actor=Actor(), reward=Reward(functions="length"))
    duel.trainer = pl.Trainer(strategy=Local(), logger=False)
    duel.setup("predict")
    assert duel.actor.seed == 0
    assert duel.rival.seed not in (0, None)


class Idle(GRPO):
    """Learns in the first iteration; later from no rows, and from rows without a valid token."""

    def step(self, batch: Batch) -> Metrics:
        if not self.global_step:
            return super().step(batch)
        rows, _ = self.compute_advantage(self.scored(batch))
        nothing = rows | {"response_mask": torch.zeros_like(rows["response_mask"])}
        for idle in (rows.take([]), nothing):
            assert self.actor.update_actor(idle, loss=self.policy_loss).fetch() == {}
        return Metrics()

    def scored(self, batch: Batch) -> Batch:
        batch = self.answers_to(batch, self.group_size)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        return batch | self.reward.compute_reward(batch)


def moved(before: Weights, after: Weights) -> bool:
    """Whether any of the actor's weights are others."""
    return any(not torch.equal(weight, after["actor"][name]) for name, weight in before["actor"].items())


def test_what_has_no_token_to_learn_from_moves_nothing(tmp_path: Path) -> None:
    def run(steps: int) -> Keep:
        actor = Actor(path=write_model(tmp_path), sampling=Sampling(max_new_tokens=4))
        idle = Idle(actor=actor, reward=Reward(functions="length"), group_size=2)
        data = TaskData(batch_size=2, num_rows=8, num_val_rows=0)
        return fitted(idle, data, steps=steps)

    once, later = run(1), run(3)
    assert moved(once.fresh, once.weights)
    assert not moved(once.weights, later.weights)


class Halved(DPO):
    """Learns in the first iteration; later from pairs without a rejected answer."""

    def step(self, batch: Batch) -> Metrics:
        if self.global_step:
            chosen = (torch.arange(len(batch)) % 2 == 0)[:, None]
            batch |= {"response_mask": batch["response_mask"] & chosen}
        return super().step(batch)


def test_what_has_no_whole_pair_to_learn_from_moves_nothing(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "chosen": "good", "rejected": "bad"} for n in range(6)]

    def run(steps: int) -> Keep:
        halved = Halved(actor=Actor(path=write_model(tmp_path)))
        return fitted(halved, PreferenceData.from_rows(rows, batch_size=2), steps=steps)

    once, later = run(1), run(3)
    assert moved(once.fresh, once.weights)
    assert not moved(once.weights, later.weights)
