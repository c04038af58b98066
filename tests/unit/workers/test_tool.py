"""Roles without a model, and what a role of one's own keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

import pytest
from tensordict import TensorDict

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller import DP, Batch, Metrics, WorkerError, register
from rlhf_lightning.data import TaskData
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Tool
from tests.unit.algos.short import refusal, trainer


@dataclass(frozen=True, kw_only=True)
class Finder(Tool):
    """Finds the beginning of a prompt, and counts how often it was asked."""

    length: int = 3
    asked: int = 0

    @cached_property
    def kept(self) -> dict[str, int]:
        """Calls of this rank."""
        return {"calls": 0}

    @register(transfer=DP, reads=("rows",), returns=("found",))
    def find(self, rows: TensorDict) -> TensorDict:
        """The first letters, and the number of the call."""
        assert self.binding.engine is None
        self.kept["calls"] += 1
        found = [f"{row['prompt'][: self.length]}{self.kept['calls']}" for row in rows["rows"]]
        return {"found": found}  # type: ignore[return-value]

    @register(transfer=DP, reads=("rows",), returns=("found",))
    def write(self, rows: TensorDict) -> TensorDict:
        """Write into a field."""
        self.asked += 1  # type: ignore[misc]
        return rows


class Searching(GRPO):
    """Asks twice."""

    finder: Finder = field(default_factory=Finder)

    def step(self, batch: Batch) -> Metrics:
        """See what was found, by the counts of one device."""
        said = [str(row["prompt"])[:3] for row in cast(list[dict[str, object]], batch.objects("rows"))]
        for call in (1, 2):
            found = self.finder.find(batch).objects("found")
            assert found == [f"{text}{call}" for text in said]
        return Metrics.of({"mine/calls": 2.0})


class Weighing(Searching):
    """Asks a tool for what models have."""

    def step(self, batch: Batch) -> Metrics:
        self.finder.memory()
        return Metrics.of({})


class Counting(Searching):
    """Asks for what cannot be."""

    def step(self, batch: Batch) -> Metrics:
        self.finder.write(batch)
        return Metrics.of({})


DATA = TaskData(batch_size=2, num_rows=4)


def test_a_tool_has_no_model_and_keeps_what_it_likes(tmp_path: Path) -> None:
    algorithm, run = Searching(), trainer(Local(), tmp_path)
    run.fit(algorithm, datamodule=DATA)
    assert float(run.logged_metrics["mine/calls"]) == 2
    assert (algorithm.finder.path, algorithm.reference.path) == ("", "embedded")


def test_a_tool_reads_no_path(tmp_path: Path) -> None:
    told = refusal(Searching(finder=Finder(path="embedded")), tmp_path)
    assert told.startswith("Finder(path='embedded'): it holds no model, so nothing reads the path. Leave it")


def test_a_role_that_writes_into_its_fields_is_told_where_to_keep_what_changes(tmp_path: Path) -> None:
    said = r"^finder\[rank 0, .*\.write: cannot assign to field 'asked' of finder: its fields are options, "
    with pytest.raises(WorkerError, match=said + r".*`@cached_property def kept\(self\): return \{\}` above"):
        trainer(Local(), tmp_path).fit(Counting(), datamodule=DATA)


def test_a_tool_has_no_engine_to_ask(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"Finder: it holds no model, so there is no engine to ask\."):
        trainer(Local(), tmp_path).fit(Weighing(), datamodule=DATA)
