"""Numbers of given answers: means over all held-out rows, at temperature 1."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import DPO, SFT, ProcessRewardModel
from rlhf_lightning.data import CompletionData, PreferenceData, StepData
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Scorer
from tests.unit.algos.small import write_rows

NUM_ROWS = 7


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Answers of very different lengths, and of one to four steps."""
    every: list[dict[str, object]] = [
        {
            "prompt": f"Question {n}: ",
            "response": "a" * (1 + 5 * n),
            "chosen": "a" * (1 + 2 * n),
            "rejected": "b",
            "steps": ["right", "wrong", "b", "c"][: 1 + n % 4],
            "labels": [1, 0, 1, 1][: 1 + n % 4],
        }
        for n in range(NUM_ROWS + 5)
    ]
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", every)


def validated(algorithm: RLHFAlgorithm, data: pl.LightningDataModule, root: Path) -> dict[str, float]:
    trainer = pl.Trainer(
        strategy=Local(), accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=root
    )
    (found,) = trainer.validate(algorithm, datamodule=data, verbose=False)
    return {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize("kind", ["sft", "process"])
def test_means_do_not_depend_on_the_batches(kind: str, model: str, rows: str, tmp_path: Path) -> None:
    def found(batch_size: int) -> dict[str, float]:
        if kind == "sft":
            data = CompletionData(path=rows, batch_size=batch_size, val_rows=NUM_ROWS)
            return validated(SFT(actor=Actor(path=model)), data, tmp_path)
        steps = StepData(path=rows, batch_size=batch_size, val_rows=NUM_ROWS)
        return validated(ProcessRewardModel(reward=Scorer(path=model)), steps, tmp_path)

    alone = found(1)
    assert found(3) == pytest.approx(alone, rel=1e-5)
    assert found(5) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_temperature_changes_no_likelihood(kind: str, model: str, rows: str, tmp_path: Path) -> None:
    def loss(temperature: float) -> float:
        actor = Actor(path=model, sampling=Sampling(temperature=temperature))
        if kind == "sft":
            data = CompletionData(path=rows, batch_size=1, val_rows=NUM_ROWS)
            return validated(SFT(actor=actor), data, tmp_path)["val/loss"]
        pairs = PreferenceData(path=rows, batch_size=1, val_rows=NUM_ROWS)
        return validated(DPO(actor=actor), pairs, tmp_path)["val/chosen_log_prob"]

    assert loss(0.5) == pytest.approx(loss(1.0), rel=1e-6)
