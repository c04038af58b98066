"""DAPO gathers groups whose scores differ, over as many batches of prompts as it takes (Yu 2025, eq. 11)."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from rlhf_lightning.algos import DAPO
from rlhf_lightning.callbacks import RewardCurve
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.controller.block import Block
from rlhf_lightning.data import PromptData
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.waiting import WaitingGroups
from rlhf_lightning.workers import Actor, Reward
from tests.unit.algos.short import trainer
from tests.unit.algos.small import Keep, run, write_rows

ROWS, BATCH, GROUP = 24, 4, 3


def teaching(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """Scores that differ within a group where the row says that they do, else zeros."""
    del prompts
    places = [float(i % GROUP) for i in range(len(responses))]
    return [place if row["teaches"] else 0.0 for place, row in zip(places, rows, strict=True)]


class Seen(DAPO):
    """Notes the prompts that each update learns from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.learned: list[list[object]] = []

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        rows = batch.objects("rows")[:: self.group_size]
        self.learned.append([row["number"] for row in rows if isinstance(row, dict)])
        assert torch.equal(batch["prompt_mask"].any(1), torch.ones(len(batch), dtype=torch.bool))
        return super().compute_advantage(batch)


def dapo(model: str, *, group_size: int = GROUP, new_tokens: int = 4) -> Seen:
    sampling = Sampling(max_new_tokens=new_tokens)
    return Seen(
        actor=Actor(path=model, optimizer=OptimizerSpec(lr=1e-2), sampling=sampling),
        reward=Reward(functions=f"{__name__}.teaching"),
        group_size=group_size,
    )


def prompts(
    directory: Path, every: list[bool], *, rows: int = ROWS, held_out: int = 0, batch_size: int = BATCH
) -> PromptData:
    """Of four neighbours those that are said teach; prompts of all lengths, in the order of the file."""
    every_row = [{"prompt": "a" * (1 + n % 7), "number": n, "teaches": every[n % BATCH]} for n in range(rows)]
    path = write_rows(directory / "prompts.jsonl", list(every_row))
    return PromptData(path=path, batch_size=batch_size, val_rows=held_out, shuffle=False)


def test_a_batch_is_learned_from_once_it_is_whole(model: str, tmp_path: Path) -> None:
    algorithm = dapo(model)
    kept = run(algorithm, prompts(tmp_path, [True, False, False, True]), steps=4)
    assert [("actor/loss" in numbers) for numbers in kept.numbers] == [False, True, True, True]
    assert [numbers["response/held_prompts"] for numbers in kept.numbers] == [2, 4, 2, 4]
    for name in ("response/dropped_prompts", "response/tied_prompts"):  # of all, not of those learned from
        assert {numbers[name] for numbers in kept.numbers} == {0.5}
    for numbers in kept.numbers:
        mean = numbers["response/tokens"] / (BATCH * GROUP)
        assert numbers["response/length_mean"] == pytest.approx(mean)
        assert mean <= numbers["response/length_max"] <= 4
        assert 0 <= numbers["response/truncated"] <= 1
        assert numbers["reward/drawn"] == 0.5  # scores 0, 1, 2 in half of the groups, and none in the others
    assert algorithm.learned == [[0, 3, 4, 7], [8, 11, 12, 15]]


def test_a_curve_has_points_where_something_was_learned(model: str, tmp_path: Path) -> None:
    """An iteration that only gathers groups reports no reward; that of the one before is no point of it."""
    curve = RewardCurve()
    looks = [curve, EarlyStopping("reward/mean")]  # which finds the last value after step 3
    data = prompts(tmp_path, [True, False, False, True], rows=26, held_out=2)
    options: dict[str, object] = {"val_check_interval": 3, "limit_val_batches": None, "callbacks": looks}
    trainer(Local(), tmp_path, steps=4, **options).fit(dapo(model), datamodule=data)
    assert [step for step, _ in curve.state_dict()["reward/mean"]] == [2, 4]
    assert [step for step, _ in curve.state_dict()["val/reward"]] == [3]


def test_a_short_last_batch_is_not_enough(model: str, tmp_path: Path) -> None:
    algorithm = dapo(model)
    kept = run(algorithm, prompts(tmp_path, [True, False, False, False], rows=6), steps=2)
    assert [numbers["response/held_prompts"] for numbers in kept.numbers] == [1, 2]
    assert algorithm.learned == []


def test_no_group_is_older_than_the_weights(model: str, tmp_path: Path) -> None:
    algorithm = dapo(model)
    kept = run(algorithm, prompts(tmp_path, [True, True, False, True]), steps=4)
    assert [numbers["response/held_prompts"] for numbers in kept.numbers] == [3, 6, 3, 6]
    assert {numbers["response/dropped_prompts"] for numbers in kept.numbers} == {0.25}
    assert algorithm.learned == [[0, 1, 3, 4], [8, 9, 11, 12]]


def test_nothing_is_learned_where_all_scores_are_the_same(model: str, tmp_path: Path) -> None:
    algorithm = dapo(model)
    kept = run(algorithm, prompts(tmp_path, [False] * BATCH), steps=3)
    assert algorithm.learned == []
    assert torch.equal(kept.first["actor"]["lm_head.weight"], kept.weights["actor"]["lm_head.weight"])


def saving(root: Path, *, steps: int, kept: Keep) -> pl.Trainer:
    """One that ends after so many steps, and keeps checkpoints."""
    options: dict[str, object] = {"enable_checkpointing": True, "limit_val_batches": None}
    options["callbacks"] = [kept, ModelCheckpoint(root, save_last=True)]
    return trainer(Local(), root, steps=steps, **options)


def fit(algorithm: DAPO, data: PromptData, root: Path, *, steps: int, resumed: str | None = None) -> Keep:
    """Run until so many steps, with checkpoints."""
    kept = Keep()
    saving(root, steps=steps, kept=kept).fit(algorithm, datamodule=data, ckpt_path=resumed)
    return kept


@pytest.mark.parametrize(("steps", "rows"), [(1, 24), (3, 24), (1, 10), (2, 10)])
def test_what_is_held_goes_through_a_checkpoint(model: str, steps: int, rows: int, tmp_path: Path) -> None:
    data = prompts(tmp_path, [rows < ROWS, False, rows == ROWS, False], rows=rows)
    whole, first, rest = dapo(model), dapo(model), dapo(model)
    once = fit(whole, data, tmp_path / "once", steps=5)
    fit(first, data, tmp_path / "parts", steps=steps)
    again = fit(rest, data, tmp_path / "parts", steps=5, resumed="last")
    assert whole.learned == first.learned + rest.learned
    assert whole.learned
    for name, weight in once.weights["actor"].items():
        assert torch.equal(weight, again.weights["actor"][name]), name


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"group_size": 4}, r"algo.group_size=4: .* there it is 3. Go on with --algo.group_size 3"),
        ({"new_tokens": 5}, r"max_new_tokens=5: .* Go on with --algo.actor.sampling.max_new_tokens 4"),
    ],
)
def test_groups_that_cannot_wait_with_others(
    model: str, changed: dict[str, int], told: str, tmp_path: Path
) -> None:
    data = prompts(tmp_path, [False, True, False, False])
    fit(dapo(model), data, tmp_path, steps=1)
    with pytest.raises(ValueError, match=told):
        fit(dapo(model, **changed), data, tmp_path, steps=2, resumed="last")


@pytest.mark.parametrize("changed", [{"group_size": 2}, {"batch_size": 2}])
def test_a_batch_is_that_of_now(model: str, changed: dict[str, int], tmp_path: Path) -> None:
    """After an update and a complete epoch nothing is held, and both sizes may be others."""
    fit(dapo(model), prompts(tmp_path, [True] * BATCH, rows=BATCH), tmp_path, steps=1)
    size, rest = changed.get("batch_size", BATCH), dapo(model, group_size=changed.get("group_size", GROUP))
    data = prompts(tmp_path, [True] * BATCH, rows=BATCH, batch_size=size)
    kept = fit(rest, data, tmp_path, steps=3, resumed="last")
    assert [numbers["response/held_prompts"] for numbers in kept.numbers] == [size, size]
    assert [len(numbers) for numbers in rest.learned] == [size, size]


def test_a_short_batch_of_larger_groups_is_not_enough(model: str, tmp_path: Path) -> None:
    """Within an epoch the next batch may be its last, which does not say how many prompts a whole one has."""
    data = prompts(tmp_path, [True] * BATCH, rows=BATCH + 2)
    fit(dapo(model), data, tmp_path, steps=1)
    rest = dapo(model, group_size=GROUP + 1)
    kept = fit(rest, data, tmp_path, steps=3, resumed="last")
    assert [numbers["response/held_prompts"] for numbers in kept.numbers] == [2, 6]
    assert [len(numbers) for numbers in rest.learned] == [BATCH]


def test_held_groups_are_no_business_of_a_validation(model: str, tmp_path: Path) -> None:
    data = prompts(tmp_path, [False, True, False, False], held_out=2)
    fit(dapo(model), data, tmp_path, steps=1)
    alone = saving(tmp_path, steps=1, kept=Keep())
    (found,) = alone.validate(dapo(model, group_size=4, new_tokens=6), datamodule=data, ckpt_path="last")
    assert 0 < found["val/response_length"] <= 6


def test_a_second_run_begins_with_no_groups(model: str, tmp_path: Path) -> None:
    algorithm, data = dapo(model), prompts(tmp_path, [False, True, True, False])
    for run_number in range(2):
        algorithm.iterations_here = 0  # as if nothing were lost
        fit(algorithm, data, tmp_path / str(run_number), steps=3)
    assert algorithm.learned == 2 * [[1, 2, 5, 6]]


def test_a_run_in_which_no_group_teaches_says_so(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(dapo(model), prompts(tmp_path, [False] * BATCH), steps=9)
    assert "no group had answers" not in caplog.text
    run(dapo(model), prompts(tmp_path, [False] * BATCH), steps=12)
    assert caplog.text.count("in 10 iterations no group had answers of different scores") == 1


def test_only_batches_in_a_row_without_a_group_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    waiting, ids = WaitingGroups(size=1, enough=99), torch.zeros(1, 1, dtype=torch.int64)
    for kept in [False] * 9 + [True] + [False] * 9:
        waiting.add(Batch.of({"prompt_ids": ids, "prompt_mask": ids == 0}), torch.tensor([kept]))
    assert not caplog.text
    assert waiting.rows is not None
    waiting.restore({"enough": 4, "size": 1, "batch_rows": 0, "columns": {}}, new_tokens=1)
    assert waiting.enough == 4
    assert waiting.state()["columns"] == {}


def test_groups_that_wait_hold_nothing_of_those_that_do_not() -> None:
    ids = torch.arange(8)[:, None]
    waiting, answers = WaitingGroups(size=2), Batch.of({"prompt_ids": ids, "prompt_mask": ids >= 0})
    assert waiting.add(answers, torch.tensor([False, True, False, False])) == (1, None)
    assert waiting.rows is not None
    blocks = [piece.source for piece in waiting.rows.column("prompt_ids").pieces]
    assert [len(block) for block in blocks if isinstance(block, Block)] == [2]
    groups, enough = waiting.add(answers, torch.tensor([True, True, True, False]))
    assert groups == 4
    assert enough is not None
    assert enough["prompt_ids"].flatten().tolist() == [2, 3, 0, 1, 2, 3, 4, 5]
