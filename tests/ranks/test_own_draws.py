"""Rows that are drawn by what was learned so far: a run goes on within an epoch as it would have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Generator, Tensor

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import MixedData, TaskData
from rlhf_lightning.reporting import row_numbers
from tests.ranks.test_own_methods import run_documented
from tests.unit.algos.short import go_on, grpo

ROWS = 10
"""Five batches an epoch."""


class Rated(GRPO):
    """Keeps a number for each row, which tells how often it came."""

    def __post_init__(self) -> None:
        """Keep them in checkpoints."""
        super().__post_init__()
        self.rates: Tensor
        self.register_buffer("rates", torch.ones(ROWS))
        self.seen: list[list[int]] = []
        self.known: list[list[str]] = []

    def step(self, batch: Batch) -> Metrics:
        """Halve the numbers of these rows."""
        answered = self.answers_to(batch, 2)
        numbers = row_numbers(answered)
        assert numbers.view(-1, 2).tolist() == [[n, n] for n in row_numbers(batch).tolist()]
        self.seen.append(batch["row_ids"].tolist())
        self.known.append([str(row["prompt"]) for row in batch.objects("rows")])  # type: ignore[index]
        for number in row_numbers(batch).tolist():
            self.rates[number] /= 2
        return super().step(batch)


@dataclass(kw_only=True, eq=False, repr=False)
class ByRate(TaskData):
    """Draws what came seldom."""

    def draw(self, number: int, generator: Generator) -> int:
        """By the numbers of now."""
        rated: Rated = self.trainer.lightning_module  # type: ignore[union-attr,assignment]
        return int(torch.multinomial(rated.rates**2, 1, generator=generator))


def rows() -> ByRate:
    return ByRate(batch_size=2, num_rows=ROWS, num_val_rows=2)


def fit(root: Path, data: ByRate | MixedData, *, steps: int, **options: object) -> Rated:
    algorithm = grpo(Rated)
    assert isinstance(algorithm, Rated)
    go_on(algorithm, data, root, steps=steps, **options)
    return algorithm


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop", [2, 5, 7], ids=["within an epoch", "after one", "within the second"])
def test_a_run_goes_on_with_the_rows_that_it_would_have_drawn(stop: int, tmp_path: Path) -> None:
    data = rows()
    whole = fit(tmp_path / "whole", data, steps=9)
    places = [[key % 2**32 for key in ids] for ids in whole.seen]
    assert [key >> 32 for ids in whole.seen for key in ids] == list(range(18)), "each draw has its own id"
    assert sorted(places[0] + places[1] + places[2] + places[3] + places[4]) != list(range(ROWS))
    assert whole.known == [[data.train_rows[place]["prompt"] for place in batch] for batch in places]
    first = fit(tmp_path / "cut", rows(), steps=stop)
    second = fit(tmp_path / "cut", rows(), steps=9)
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.rates, whole.rates)


@pytest.mark.filterwarnings("ignore")
def test_rows_are_drawn_beside_other_data_and_the_first_ones_to_be_overfitted(tmp_path: Path) -> None:
    second = TaskData(completions=True, batch_size=2, num_rows=4, num_val_rows=0)
    mixed = fit(tmp_path / "mixed", MixedData(main=rows(), ptx=second), steps=4)
    assert mixed.seen == fit(tmp_path / "alone", rows(), steps=4).seen
    over = fit(tmp_path / "over", rows(), steps=4, overfit_batches=2)
    assert [[key % 2**32 for key in ids] for ids in over.seen] == 2 * [[0, 1], [2, 3]]


@pytest.mark.filterwarnings("ignore")
def test_shuffling_is_nothing_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = ByRate(batch_size=2, num_rows=ROWS, num_val_rows=2, shuffle=False, drop_last=True)
    assert fit(tmp_path / "plain", plain, steps=3).seen == fit(tmp_path / "other", rows(), steps=3).seen
    odd = ByRate(batch_size=2, num_rows=ROWS + 1, num_val_rows=2, shuffle=False, drop_last=True)
    fit(tmp_path / "odd", odd, steps=1)
    assert "every epoch leaves out" not in caplog.text


def test_a_worker_would_draw_too_early() -> None:
    with pytest.raises(
        ValueError, match=r"^data\.num_workers=1: ByRate\.draw is asked .* Try --data\.num_workers 0"
    ):
        ByRate(num_workers=1)


def test_unless_overridden_draws_are_in_order() -> None:
    data = TaskData(num_rows=4, num_val_rows=0, tokenizer="embedded")
    data.setup("validate")
    assert [data.draw(number, Generator()) for number in range(6)] == [0, 1, 2, 3, 0, 1]


def rates(root: Path, *, steps: int) -> list[float]:
    """Train as docs/own_data.md has it, from a checkpoint where there is one, and return the rates."""
    names: dict[str, Any] = run_documented("class ByRate(PromptData)")
    prompts = [{"prompt": f"Sort {number}: ", "answer": str(number)} for number in (21, 43, 65, 87)]
    data = names["ByRate"].from_rows(prompts, batch_size=2)
    algorithm = grpo(names["Rated"])
    go_on(algorithm, data, root, steps=steps)
    return cast("list[float]", algorithm.rates.tolist())  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore")
def test_what_is_documented_goes_on(tmp_path: Path) -> None:
    whole = rates(tmp_path / "whole", steps=5)
    assert max(abs(rate - 0.5) for rate in whole) > 0.1
    assert rates(tmp_path / "cut", steps=3) != whole
    assert rates(tmp_path / "cut", steps=5) == whole
