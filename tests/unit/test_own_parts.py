"""An algorithm's own parts in the wrong place: what is asked of a handle, a set-up of the user's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor
from tests.unit.algos.short import trainer


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
