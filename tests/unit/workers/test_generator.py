"""Which group a call of the actor's handle goes to, and when weights go to the generator first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

from rlhf_lightning.controller import Batch
from rlhf_lightning.controller.register import Method, methods_of
from rlhf_lightning.workers import Actor, GenerationAhead, Generator, SeparateGeneration

METHODS = methods_of(Actor)


@dataclass
class Noting:
    """A group of workers that notes its calls, and answers each row with its id."""

    name: str
    calls: list[str]
    row_ids: list[list[int]] = field(default_factory=list)

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """See `Caller.call`."""
        self.calls.append(f"{self.name}.{method.name}")
        if batch is None:
            return None
        self.row_ids.append(batch["row_ids"].tolist())
        return Batch.of({"response_ids": batch["row_ids"][:, None], "log_probs": torch.ones(len(batch), 1)})


def batch(first: int, rows: int = 3) -> Batch:
    return Batch.of({"row_ids": torch.arange(first, first + rows)})


def test_weights_go_before_the_first_answers_and_after_every_change() -> None:
    calls: list[str] = []
    separate = SeparateGeneration(
        Noting("actor", calls), Noting("generator", calls), recompute_log_probs=False
    )
    sync = ["actor.send_weights", "generator.receive_weights"]
    answer = ["generator.generate_sequences"]
    for name in ("generate_sequences", "compute_log_prob", "generate_sequences"):
        separate.call(METHODS[name], batch(0), {})
    assert calls == [*sync, *answer, "actor.compute_log_prob", *answer]
    calls.clear()
    separate.call(METHODS["update_actor"], batch(0), {})
    found = separate.call(METHODS["generate_sequences"], batch(0), {"greedy": True})
    assert calls == ["actor.update_actor", *sync, *answer]
    assert isinstance(found, Batch)
    assert found["weights_version"].tolist() == [2, 2, 2]


def test_log_probs_are_the_actors_where_it_wants_so() -> None:
    calls: list[str] = []
    separate = SeparateGeneration(
        Noting("actor", calls), Noting("generator", calls), recompute_log_probs=True
    )
    separate.call(METHODS["generate_sequences"], batch(0), {})
    assert calls[-2:] == ["generator.generate_sequences", "actor.compute_log_prob"]
    separate.call(METHODS["generate_sequences"], batch(0), {"greedy": True})
    assert calls[-1] == "generator.generate_sequences"


def test_one_batch_ahead() -> None:
    calls: list[str] = []
    generator = Noting("generator", calls)
    ahead = GenerationAhead(Noting("actor", calls), generator, recompute_log_probs=False)
    seen = []
    for first in (0, 10, 20):
        found = ahead.call(METHODS["generate_sequences"], batch(first), {})
        assert isinstance(found, Batch)
        seen.append((found["response_ids"][:, 0] % (1 << 61)).tolist())
        seen.append([ahead.staleness])
        ahead.call(METHODS["update_actor"], batch(first), {})
    assert seen == [[0, 1, 2], [0], [0, 1, 2], [1], [10, 11, 12], [1]]
    assert generator.row_ids[0] != generator.row_ids[1]
    with pytest.raises(ValueError, match="a batch of 2 rows follows one of 3"):
        ahead.call(METHODS["generate_sequences"], batch(30, rows=2), {})


def test_a_generator_is_its_actors_copy() -> None:
    actor = Actor(path="somewhere", seed=3, recompute_log_probs=True)
    generator = Generator.of(actor)
    assert (generator.path, generator.actor.path, generator.actor.seed) == ("somewhere", "somewhere", 3)
    assert not generator.actor.recompute_log_probs
    assert not generator.kept
