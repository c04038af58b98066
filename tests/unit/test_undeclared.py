"""A step that calls what its algorithm, or a role, does not have, and a set-up that completes no model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reference
from tests.unit.algos.short import trainer


class Forgetful(RLHFAlgorithm):
    """Has an actor alone."""

    name: str = "critic"
    actor: Actor = field(default_factory=lambda: Actor(sampling=Sampling(max_new_tokens=2)))

    def step(self, batch: Batch) -> Metrics:
        """Look for another."""
        batch |= self.actor.generate_sequences(batch)
        return Metrics.of({"mine/number": getattr(self, self.name).number})


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        (
            "critic",
            ValueError,
            r"^Forgetful\.step: self\.critic is not a role of it, which has actor\. Write `critic: Critic = "
            r"field\(default_factory=Critic\)` in the class\.$",
        ),
        ("numbers", AttributeError, "has no attribute 'numbers'"),
        ("actor", AttributeError, "has no attribute 'number'"),
    ],
)
def test_it_is_told_how_to_declare_one(name: str, error: type[Exception], says: str, tmp_path: Path) -> None:
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=0)
    with pytest.raises(error, match=says):
        trainer(Local(), tmp_path).fit(Forgetful(name=name), datamodule=data)


class Confusing(Forgetful):
    """Calls a model as another kind of model is called, or by a name that is almost right."""

    reference: Reference = field(default_factory=Reference)

    def step(self, batch: Batch) -> Metrics:
        """Call."""
        role, _, call = self.name.partition(".")
        batch |= getattr(getattr(self, role), call)(batch)
        return Metrics()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "reference.generate_sequences",
            "Reference has no generate_sequences, a call of Actor and Opponent. Its calls are follow, ",
        ),
        (
            "reference.compute_log_prob",
            "Reference has no compute_log_prob, a call of Actor and Opponent. Did you mean "
            "compute_ref_log_prob?",
        ),
        ("reference.compute_values", "Reference has no compute_values, a call of Critic. Its calls are "),
        ("reference.update_actor", "Reference has no update_actor, a call of Actor. Its calls are follow, "),
        ("actor.generate_sequence", "Actor has no generate_sequence. Did you mean generate_sequences?"),
    ],
)
def test_a_call_of_another_model_is_told_of(name: str, says: str, tmp_path: Path) -> None:
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=0)
    with pytest.raises(ValueError, match=rf"^Confusing\.step: {re.escape(says)}") as refused:
        trainer(Local(), tmp_path).fit(Confusing(name=name), datamodule=data)
    draws = name == "reference.generate_sequences"
    assert ("`opponent: Opponent = field(default_factory=Opponent)`" in str(refused.value)) == draws


class Evaluating(Confusing):
    """Calls it as it validates."""

    def evaluate(self, batch: Batch) -> Batch:
        """Call."""
        self.step(batch)
        return batch


class Validating(Confusing):
    """Asks for a role that it lacks."""

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Ask."""
        Forgetful.step(self, Batch.of(batch))


class Starting(Confusing):
    """Calls it before the first step."""

    def on_train_start(self) -> None:
        """Call."""
        self.step(Batch({}, num_rows=1))


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        (Evaluating, "reference.compute_values", "Reference has no compute_values, a call of Critic. Its"),
        (
            Validating,
            "critic",
            "self.critic is not a role of it, which has actor, reference. Write `critic: ",
        ),
        (Starting, "reference.compute_values", "Reference has no compute_values, a call of Critic. Its"),
    ],
)
def test_hooks_are_told_of_it_too(kind: type[Confusing], name: str, says: str, tmp_path: Path) -> None:
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=2)
    run = trainer(Local(), tmp_path, limit_val_batches=int(kind is not Starting))
    with pytest.raises(AttributeError) as error:
        run.fit(kind(name=name), datamodule=data)
    (note,) = error.value.__notes__
    assert note.startswith(says)


@dataclass(frozen=True, kw_only=True)
class Watched(Actor):
    """Has methods that are for the devices, and are not registered."""

    def weight(self) -> int:
        """Ask for the engine."""
        return self.engine.reload_bytes()

    def rank(self) -> int:
        """Ask for the place."""
        return self.worker.rank


class Watching(Forgetful):
    """Calls one of them."""

    actor: Actor = field(default_factory=Watched)

    def step(self, batch: Batch) -> Metrics:
        """Call."""
        return Metrics.of({"mine/number": getattr(self.actor, self.name)()})


@pytest.mark.parametrize("name", ["weight", "rank"])
def test_what_devices_alone_have_is_asked_for_there(name: str, tmp_path: Path) -> None:
    said = r"^Watched: .* on the devices alone.*@register\(transfer=\.\.\.\)"
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=0)
    with pytest.raises(ValueError, match=said):
        trainer(Local(), tmp_path).fit(Watching(name=name), datamodule=data)


class Hasty(Forgetful):
    """Sets up something of its own alone."""

    def setup(self, stage: str) -> None:
        """Replace what completes and checks the models."""
        del stage


def test_a_set_up_of_its_own_completes_the_models_too(tmp_path: Path) -> None:
    said = r"Hasty\.setup leaves out what completes and checks the models\. .* super\(\)\.setup\(stage\)"
    with pytest.raises(ValueError, match=said):
        trainer(Local(), tmp_path).fit(Hasty(), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=0))
