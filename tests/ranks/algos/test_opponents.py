"""Steps in which an older self of the actor answers, too."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import SFTLoss
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Opponent
from tests.unit.algos.short import trainer
from tests.unit.algos.small import Keep, run, write_model


def data() -> TaskData:
    return TaskData(batch_size=4, num_rows=8, num_val_rows=0)


class SelfPlay(RLHFAlgorithm):
    """Learns from what an older self has drawn."""

    actor: Actor = field(default_factory=Actor)
    opponent: Opponent = field(default_factory=Opponent)

    def step(self, batch: Batch) -> Metrics:
        """How far the two are apart before an update, and after it."""
        batch |= self.opponent.generate_sequences(batch)
        numbers = {"mine/before": self.apart(batch), "mine/width": batch["response_mask"].shape[1]}
        metrics = self.actor.update_actor(batch, loss=SFTLoss())
        return metrics | Metrics.of(numbers | {"mine/after": self.apart(batch)})

    def apart(self, batch: Batch) -> float:
        """The largest difference of a token's log-probability."""
        found = [role.compute_log_prob(batch)["log_probs"] for role in (self.actor, self.opponent)]
        return float((found[0] - found[1]).abs().max())


def self_play(path: str, opponent: Opponent, *, lr: float = 1e-2) -> SelfPlay:
    sampling = Sampling(max_new_tokens=6, temperature=0.5)
    return SelfPlay(
        actor=Actor(path=path, optimizer=OptimizerSpec(lr=lr), sampling=sampling), opponent=opponent
    )


@pytest.mark.parametrize(
    ("decay", "every", "same"), [(0.0, 1, [0, 1, 2, 3]), (0.0, 2, [0, 2]), (0.5, 1, [0]), (None, 1, [0])]
)
def test_an_opponent_begins_as_the_actor_and_follows_it(
    model: str, decay: float | None, every: int, same: list[int]
) -> None:
    kept = run(self_play(model, Opponent(decay=decay, every=every)), data(), steps=4)
    assert list(kept.weights) == ["actor"]
    assert [i for i, numbers in enumerate(kept.numbers) if numbers["mine/before"] == 0] == same
    assert all(numbers["mine/after"] > 1e-3 for numbers in kept.numbers)
    assert {numbers["mine/width"] for numbers in kept.numbers} == {6}


def test_an_opponent_draws_as_it_is_told(model: str) -> None:
    kept = run(self_play(model, Opponent(sampling=Sampling(max_new_tokens=3))), data(), steps=1)
    assert kept.numbers[0]["mine/width"] == 3
    assert kept.numbers[0]["mine/before"] > 1e-3, "its temperature is another, too"


class Imitating(SelfPlay):
    """Reads given answers, too, at temperature 1."""

    needs = ("response_ids",)


def test_beside_given_answers_an_opponent_draws_as_the_actor_was_told_to(model: str) -> None:
    """As in SPIN, while both read at the temperature at which given answers are read."""
    rows = TaskData(batch_size=4, num_rows=8, num_val_rows=0, completions=True)
    sampling = Sampling(max_new_tokens=6, temperature=0.5)
    algorithm = Imitating(actor=Actor(path=model, sampling=sampling))
    kept = run(algorithm, rows, steps=1)
    assert algorithm.actor.sampling.temperature == 1
    assert algorithm.opponent.sampling == sampling
    assert kept.numbers[0]["mine/before"] == 0, "they are one model, and so a margin of SPIN begins at 0"


def test_an_opponent_reads_at_a_temperature_of_its_own(model: str) -> None:
    other, same = Opponent(temperature=0.7), Opponent(temperature=0.5)
    for opponent, apart in ((other, True), (same, False)):
        kept = run(self_play(model, opponent), data(), steps=1)
        assert (kept.numbers[0]["mine/before"] > 1e-3) == apart


def test_an_opponents_answers_have_to_fit(model: str) -> None:
    opponent = Opponent(sampling=Sampling(max_new_tokens=600))
    with pytest.raises(ValueError, match="max_new_tokens=600"):
        run(self_play(model, opponent), data(), steps=1)


def test_another_model_does_not_become_the_actor(model: str, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    told = r"^opponent\.path='.*/other' with opponent\.decay=0\.0: .* Type --algo\.opponent\.decay null, "
    with pytest.raises(ValueError, match=told):
        run(self_play(model, Opponent(path=other)), data(), steps=1)
    run(self_play(model, Opponent(path=f"{model}/")), data(), steps=1)
    kept = run(self_play(model, Opponent(path=other, init_seed=7, decay=None)), data(), steps=2)
    assert all(numbers["mine/before"] > 1e-3 for numbers in kept.numbers)


class Mistaken(SelfPlay):
    """Has the opponent learn."""

    call: str = ""

    def step(self, batch: Batch) -> Metrics:
        batch |= self.opponent.generate_sequences(batch)
        return Metrics.of(getattr(self.opponent, self.call)(batch, loss=SFTLoss()).fetch())


@pytest.mark.parametrize("call", ["update_actor", "accumulate_actor"])
@pytest.mark.parametrize("decay", [0.9, None])
def test_an_opponent_does_not_learn(model: str, call: str, decay: float | None) -> None:
    algorithm = Mistaken(actor=Actor(path=model), opponent=Opponent(decay=decay), call=call)
    told = rf"^Opponent\.{call}: an opponent does not learn, .* Call self\.actor\.{call}, or make the "
    with pytest.raises(ValueError, match=told):
        run(algorithm, data(), steps=1)


class Alone(SelfPlay):
    """Has nobody to follow."""

    actor: Opponent = field(default_factory=Opponent)


def test_the_actor_is_nobodys_opponent() -> None:
    with pytest.raises(ValueError, match=r"^Alone\.actor: an Opponent follows the field actor"):
        run(Alone(), data(), steps=1)


def test_a_resumed_run_has_the_opponent_of_the_checkpoint(model: str, tmp_path: Path) -> None:
    whole = run(self_play(model, Opponent(every=3)), data(), steps=5).numbers
    own, kept = LastCheckpoint(tmp_path / "checkpoints"), Keep()
    for steps, path in ((4, None), (5, own.path)):
        fit = trainer(Local(), tmp_path, steps=steps, enable_checkpointing=True, callbacks=[own, kept])
        fit.fit(self_play(model, Opponent(every=3)), datamodule=data(), ckpt_path=path)
    assert kept.numbers[4]["mine/before"] == pytest.approx(whole[4]["mine/before"])
    assert kept.numbers[4]["mine/before"] > 1e-3
