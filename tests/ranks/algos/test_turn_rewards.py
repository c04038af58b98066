"""Rewards of turns: their texts, and the algorithm of docs/environments.md that learns from them."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import pytest

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.reporting import answers, turn_texts
from rlhf_lightning.reporting import texts as in_tables
from rlhf_lightning.workers import Reward
from tests.ranks.algos.test_turns import REPLY, actor, data, grpo, insists, turns_of
from tests.ranks.test_own_methods import run_documented
from tests.unit.algos.small import run

REPLIES = "so: 42"
"""What is left of `REPLY` without special tokens."""


def test_turns_as_texts(model: str) -> None:
    algorithm = grpo(model, insists)
    run(algorithm, data(), steps=1)
    (batch,) = algorithm.batches
    found, wholes = turn_texts(batch, algorithm.tokenizer), answers(batch, algorithm.tokenizer)
    assert REPLIES in REPLY
    for texts, whole, turns in zip(found, wholes, turns_of(batch, algorithm), strict=True):
        assert "".join(texts) == whole
        assert texts[1::2] == [REPLIES] * (len(turns) // 2)
        assert len(texts) == len(turns)
    assert {len(texts) for texts in found} >= {3, 5}
    tables = [str(whole).count(REPLY) for whole in in_tables(batch, algorithm.tokenizer)["responses"]]
    assert tables == [len(texts) // 2 for texts in found], "with special tokens, which rewards do not read"


def test_the_documented_algorithm_learns_from_turns(model: str) -> None:
    documented = run_documented("class TurnCredit(GRPO)")
    kind = cast(type[GRPO], documented["TurnCredit"])
    batches: list[Batch] = []

    class Lengths(kind):  # type: ignore[misc, valid-type]
        """Turns of a model that knows nothing have many lengths."""

        def worth(self, said: str) -> float:
            return float(len(said))

        def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
            found, metrics = super().compute_advantage(batch)
            batches.append(found)
            return found, metrics

    algorithm = Lengths(actor=actor(model, insists), reward=Reward(functions="length"), group_size=4)
    run(algorithm, data(), steps=1)
    (batch,) = batches
    said = [[len(text) for text in texts[::2]] for texts in turn_texts(batch, algorithm.tokenizer)]
    for row, advantages in enumerate(batch["advantages"].tolist()):
        others = said[row - row % 4 :][:4]
        rest = [sum(said[row][turn:]) - sum(sum(o[turn:]) for o in others) / 4 for turn in range(3)]
        expected = [rest[0]]
        for before, own in pairwise(batch["response_mask"][row].tolist()):
            rest = rest[1:] if own and not before else rest
            expected.append(rest[0] * own)
        assert advantages == pytest.approx(expected)
    assert batch["advantages"].std() > 1
