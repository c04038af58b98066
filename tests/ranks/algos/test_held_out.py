"""Numbers of given answers: means over all held-out rows, at temperature 1."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import DPO, KTO, SFT, ProcessRewardModel, SimPO
from rlhf_lightning.data import CompletionData, PreferenceData, PromptData, RowData, StepData, UnpairedData
from rlhf_lightning.functional import Aggregation, DPOLoss, KTOLoss, SFTLoss, SimPOLoss
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reference, Scorer
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
            "good": n % 4 > 1,
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


def algorithm(kind: str, model: str) -> RLHFAlgorithm:
    """One of which the policy is not the reference."""
    actor, reference = Actor(path=model), Reference(path=model, init_seed=7)
    if kind == "process":
        return ProcessRewardModel(reward=Scorer(path=model))
    if kind == "kto":
        return KTO(actor=actor, reference=reference, loss=KTOLoss(baseline=False, beta=0.5))
    if kind == "dpo":
        return DPO(actor=actor, reference=reference, loss=DPOLoss(sft_coef=1.0))
    if kind == "simpo":
        return SimPO(actor=actor, loss=SimPOLoss(sft_coef=1.0))
    return SFT(actor=actor, loss=SFTLoss(aggregation=cast(Aggregation, kind)))


def data(kind: str, rows: str, size: int) -> RowData:
    """What it learns from."""
    if kind == "kto":
        return UnpairedData(path=rows, batch_size=size, val_rows=NUM_ROWS, label_field="good")
    kinds: dict[str, type[PromptData]] = {"process": StepData, "dpo": PreferenceData, "simpo": PreferenceData}
    return kinds.get(kind, CompletionData)(path=rows, batch_size=size, val_rows=NUM_ROWS)


@pytest.mark.parametrize(
    "kind", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "process", "kto", "dpo", "simpo"]
)
def test_means_do_not_depend_on_the_batches(kind: str, model: str, rows: str, tmp_path: Path) -> None:
    def found(batch_size: int) -> dict[str, float]:
        numbers = validated(algorithm(kind, model), data(kind, rows, batch_size), tmp_path)
        if kind in ("dpo", "simpo"):
            del numbers["val/loss"]  # a mean over pairs and one over tokens
        return numbers

    whole = found(NUM_ROWS)
    assert whole
    assert found(3) == pytest.approx(whole, rel=1e-5)
    assert found(5) == pytest.approx(whole, rel=1e-5)
    if kind == "kto":
        margin = whole["val/desirable_reward"] - whole["val/undesirable_reward"]
        assert whole["val/margin"] == pytest.approx(margin, rel=1e-5)
        assert found(1) == pytest.approx(whole, rel=1e-5), "no batch has rows of both labels"


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_temperature_changes_no_likelihood(kind: str, model: str, rows: str, tmp_path: Path) -> None:
    def loss(temperature: float) -> float:
        actor = Actor(path=model, sampling=Sampling(temperature=temperature))
        if kind == "sft":
            return validated(SFT(actor=actor), data(kind, rows, 1), tmp_path)["val/loss"]
        return validated(DPO(actor=actor), data(kind, rows, 1), tmp_path)["val/chosen_log_prob"]

    assert loss(0.5) == pytest.approx(loss(1.0), rel=1e-6)
