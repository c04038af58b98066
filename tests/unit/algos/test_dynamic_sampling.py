"""DAPO gathers groups whose scores differ, over as many batches of prompts as it takes (Yu 2025, eq. 11)."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from rlhf_lightning.algos import DAPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import PromptData
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward
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
        rows = batch.objects("rows")[::GROUP]
        self.learned.append([row["number"] for row in rows if isinstance(row, dict)])
        assert torch.equal(batch["prompt_mask"].any(1), torch.ones(len(batch), dtype=torch.bool))
        return super().compute_advantage(batch)


def dapo(model: str) -> Seen:
    return Seen(
        actor=Actor(path=model, optimizer=OptimizerSpec(lr=1e-2), sampling=Sampling(max_new_tokens=4)),
        reward=Reward(functions=f"{__name__}.teaching"),
        group_size=GROUP,
    )


def prompts(directory: Path, every: list[bool]) -> PromptData:
    """Of four neighbours those that are said teach; prompts of all lengths, in the order of the file."""
    rows = [{"prompt": "a" * (1 + n % 7), "number": n, "teaches": every[n % BATCH]} for n in range(ROWS)]
    path = write_rows(directory / "prompts.jsonl", list(rows))
    return PromptData(path=path, batch_size=BATCH, val_rows=0, shuffle=False)


def test_a_batch_is_learned_from_once_it_is_whole(model: str, tmp_path: Path) -> None:
    algorithm = dapo(model)
    kept = run(algorithm, prompts(tmp_path, [True, False, False, True]), steps=4)
    assert [("actor/loss" in numbers) for numbers in kept.numbers] == [False, True, True, True]
    assert [numbers["response/held_prompts"] for numbers in kept.numbers] == [2, 4, 2, 4]
    assert {numbers["response/dropped_prompts"] for numbers in kept.numbers} == {0.5}
    assert algorithm.learned == [[0, 3, 4, 7], [8, 11, 12, 15]]


def test_no_group_is_older_than_the_weights(model: str, tmp_path: Path) -> None:
    algorithm = dapo(model)
    kept = run(algorithm, prompts(tmp_path, [True, True, False, True]), steps=4)
    assert [numbers["response/held_prompts"] for numbers in kept.numbers] == [3, 6, 3, 6]
    assert algorithm.learned == [[0, 1, 3, 4], [8, 9, 11, 12]]


def test_nothing_is_learned_where_all_scores_are_the_same(model: str, tmp_path: Path) -> None:
    algorithm = dapo(model)
    kept = run(algorithm, prompts(tmp_path, [False] * BATCH), steps=3)
    assert algorithm.learned == []
    assert torch.equal(kept.first["actor"]["lm_head.weight"], kept.weights["actor"]["lm_head.weight"])


@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_held_goes_through_a_checkpoint(model: str, steps: int, tmp_path: Path) -> None:
    whole, first, rest = (Keep() for _ in range(3))
    seen = []
    for kept, until, resumed in ((whole, 5, None), (first, steps, None), (rest, 5, "last")):
        algorithm = dapo(model)
        trainer = pl.Trainer(
            strategy=Local(),
            accelerator="cpu",
            max_steps=until,
            callbacks=[kept, ModelCheckpoint(tmp_path / str(kept is whole), save_last=True)],
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(algorithm, datamodule=prompts(tmp_path, [False, True, True, False]), ckpt_path=resumed)
        seen.append(algorithm.learned)
    assert seen[0] == seen[1] + seen[2]
    for name, weight in whole.weights["actor"].items():
        assert torch.equal(weight, rest.weights["actor"][name]), name
