"""What an algorithm asks its models before the first iteration changes nothing of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from tests.unit.algos.short import go_on, grpo


class Told(GRPO):
    """Notes the rows of its iterations, and how often the actor was asked in each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[list[int]] = []
        self.asked: list[int] = []

    def step(self, batch: Batch) -> Metrics:
        self.seen.append(batch["row_ids"].tolist())
        return super().step(batch)

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        self.asked.append([report.method for report in self.strategy.reports].count("generate_sequences"))


class Prepared(Told):
    """Answers all prompts before the first iteration, as docs/own_algorithm.md has it."""

    def on_train_start(self) -> None:
        for columns in self.trainer.datamodule.train_dataloader():  # type: ignore[attr-defined]
            self.actor.generate_sequences(Batch.of(columns))


def fit(kind: type[Told], root: Path, *, steps: int) -> Told:
    algorithm = grpo(kind)
    assert isinstance(algorithm, Told)
    go_on(algorithm, TaskData(batch_size=2, num_rows=10, num_val_rows=0), root, steps=steps)
    return algorithm


@pytest.mark.filterwarnings("ignore")
def test_rows_and_times_are_those_of_a_run_without_it(tmp_path: Path) -> None:
    whole = fit(Told, tmp_path / "without", steps=7)
    parts = [fit(Prepared, tmp_path / "with", steps=steps) for steps in (2, 7)]
    assert parts[0].seen + parts[1].seen == whole.seen, "the second begins within an epoch"
    assert whole.asked == 7 * [1]
    assert [part.asked for part in parts] == [2 * [1], 5 * [1]], "no seconds of earlier calls"
