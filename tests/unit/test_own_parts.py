"""An algorithm's own parts that cannot work: calls on a handle, a set-up, a role without a head."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import Head
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Role
from tests.unit.algos.short import refusal, trainer
from tests.unit.algos.small import write_model


@dataclass(frozen=True, kw_only=True)
class Watched(Actor):
    """Has methods that are for the devices, and are not registered."""

    def weight(self) -> int:
        return self.engine.reload_bytes()

    def rank(self) -> int:
        return self.worker.rank


class Watching(RLHFAlgorithm):
    """Calls one of them."""

    name: str = "weight"
    actor: Actor = field(default_factory=Watched)

    def step(self, batch: Batch) -> Metrics:
        return Metrics.of({"mine/number": getattr(self.actor, self.name)()})


def refused(algorithm: Watching, root: Path, said: str) -> None:
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=0)
    with pytest.raises(ValueError, match=said):
        trainer(Local(), root).fit(algorithm, datamodule=data)


@pytest.mark.parametrize("name", ["weight", "rank"])
def test_what_devices_alone_have_is_asked_for_there(name: str, tmp_path: Path) -> None:
    said = r"^Watched: .* on the devices alone.*@register\(transfer=\.\.\.\)"
    refused(Watching(name=name), tmp_path, said)


class Hasty(Watching):
    """Sets up something of its own alone."""

    def setup(self, stage: str) -> None:
        """Replace what completes and checks the models."""
        del stage


def test_a_set_up_of_its_own_completes_the_models_too(tmp_path: Path) -> None:
    said = r"Hasty\.setup leaves out what completes and checks the models\. .* super\(\)\.setup\(stage\)"
    refused(Hasty(), tmp_path, said)


class Halving(Watching):
    """Sets a field before it has the models completed."""

    rows: int = 4

    def setup(self, stage: str) -> None:
        """Divide to a float."""
        self.rows /= 2  # type: ignore[assignment]
        super().setup(stage)


def test_what_a_set_up_sets_is_checked(tmp_path: Path) -> None:
    refused(Halving(), tmp_path, r"^Halving\(rows=2\.0\): has to be of type int")


@dataclass(frozen=True, kw_only=True)
class Frozen(Role):
    """A number for each token, by weights that nothing trains."""

    head: ClassVar[Head] = "scalar"


class Rated(PPO):
    """Has such a model beside those of PPO."""

    rating: Frozen = field(default_factory=Frozen)


def test_a_role_that_does_not_learn_has_the_head_that_it_reads(tmp_path: Path) -> None:
    told = refusal(Rated(), tmp_path)
    assert told.startswith("rating.path=embedded: its weights have no score.weight, the head")
    bare = write_model(tmp_path / "bare")
    told = refusal(Rated(rating=Frozen(path=bare)), tmp_path)
    assert told.startswith(f"rating.path={bare}: holds a config.json without weights")
