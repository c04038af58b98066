"""One seed for the run reaches whatever has none of its own."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

import pytest

from rlhf_lightning.algos import GRPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.data.rows import Row
from rlhf_lightning.spec import run_seed
from rlhf_lightning.workers import Actor, Critic
from tests.unit.algos.short import grpo, refusal


@pytest.mark.parametrize("seed", [0, 3])
def test_a_role_without_a_seed_takes_the_runs(seed: int) -> None:
    actor = Actor().seeded(seed)
    assert (actor.seed, actor.init_seed, Critic().seeded(seed).init_seed) == (seed, seed, seed)


def test_a_seed_that_was_given_stays() -> None:
    actor = Actor(seed=1, init_seed=0).seeded(3)
    assert (actor.seed, actor.init_seed) == (1, 0)


class Two(GRPO):
    """Has another that answers."""

    other: Actor = field(default_factory=Actor)


def test_the_actor_has_the_runs_seed_and_another_one_of_its_own(tmp_path: Path) -> None:
    algorithm = grpo(Two)
    assert refusal(algorithm, tmp_path) == "started"
    assert algorithm.main_actor.seed == run_seed() != algorithm.roles()["other"].seed  # type: ignore[attr-defined]


def first_row(seed: int | None = None) -> Row:
    return TaskData(seed=seed, num_rows=1, num_val_rows=0).read().train[0]


def test_the_rows_follow_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert run_seed() == 0
    without = first_row()
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # as lightning.seed_everything does
    assert run_seed() == 7
    assert first_row() == first_row(seed=7) != without == first_row(seed=0)
