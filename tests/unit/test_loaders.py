"""Several loaders for a step that reads one, and one without a length, are refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from rlhf_lightning.algorithm import Columns
from rlhf_lightning.algos import DPO, GRPO, SFT
from rlhf_lightning.data import TaskData
from rlhf_lightning.data.batch import EncodedRow
from rlhf_lightning.strategies import Local
from rlhf_lightning.strategy import Strategy
from tests.unit.algos.short import grpo, trainer


class Twice(TaskData):
    """Reads the same held-out rows by two loaders."""

    def val_dataloader(self) -> list[DataLoader[list[EncodedRow]]]:
        """As it says."""
        return 2 * super().val_dataloader()

    def predict_dataloader(self) -> list[DataLoader[list[EncodedRow]]]:  # type: ignore[override]
        """As it says."""
        return 2 * [super().predict_dataloader()]


class Indexed(GRPO):
    """Tells the loaders apart."""

    def validation_step(self, batch: Columns, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Do nothing."""

    def predict_step(
        self, batch: Columns, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, list[object]]:
        """Answer nothing."""
        return {}


@pytest.fixture(autouse=True)
def starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would start a device says so."""

    def start(strategy: Strategy, roles: object) -> None:
        raise KeyError("it would start")

    monkeypatch.setattr(Local, "_launch", start)


def told(kind: type[GRPO], called: str, root: Path, **options: object) -> str:
    run = trainer(Local(), root, **{"limit_val_batches": 1, **options})  # type: ignore[arg-type]
    with pytest.raises((ValueError, KeyError)) as error:
        getattr(run, called)(grpo(kind), datamodule=Twice(batch_size=2, num_rows=4, num_val_rows=2))
    return str(error.value)


@pytest.mark.parametrize(
    ("called", "step"),
    [("fit", "validation_step"), ("validate", "validation_step"), ("predict", "predict_step")],
)
def test_a_step_that_reads_one_loader(called: str, step: str, tmp_path: Path) -> None:
    said = told(GRPO, called, tmp_path)
    assert said.startswith(f"2 loaders for GRPO.{step}: it reads one, ")
    assert said.endswith(f"or write a {step} of your own that takes dataloader_idx.")
    assert told(Indexed, called, tmp_path) == "'it would start'"


@pytest.mark.parametrize(("called", "kind"), [("fit", "val"), ("predict", "predict")])
def test_loaders_that_nothing_reads(called: str, kind: str, tmp_path: Path) -> None:
    assert told(GRPO, called, tmp_path, **{f"limit_{kind}_batches": 0}) == "'it would start'"


def test_loaders_without_a_data_module(tmp_path: Path) -> None:
    texts: DataLoader[str] = DataLoader(["Sort 21: ", "Sort 43: "], batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^3 loaders for GRPO\.validation_step"):
        trainer(Local(), tmp_path, limit_val_batches=1).fit(grpo(), texts, [texts] * 3)


class Endless(IterableDataset[str]):
    """Texts without an end."""

    def __iter__(self) -> Iterator[str]:
        while True:
            yield "Sort 21: "


class Counted(Endless):
    """An epoch of them is four."""

    def __len__(self) -> int:
        return 4


def said_of(texts: Endless, root: Path, *, combined: bool = False) -> str:
    loader: DataLoader[str] = DataLoader(texts, batch_size=2)
    with pytest.raises((ValueError, KeyError)) as error:
        trainer(Local(), root).fit(grpo(), CombinedLoader(loader) if combined else loader)
    return str(error.value)


def test_a_training_loader_without_a_length(tmp_path: Path) -> None:
    """Lightning would take a batch ahead, which a resumed run would never see."""
    said = said_of(Endless(), tmp_path)
    assert said.startswith("DataLoader: it gives training batches and has no length. ")
    assert said.endswith("or its IterableDataset, a __len__: the rows of an epoch, as many as you like.")
    assert said_of(Counted(), tmp_path) == "'it would start'"
    assert said_of(Counted(), tmp_path, combined=True) == "'it would start'"


@pytest.mark.filterwarnings("ignore")
def test_a_training_loader_that_nothing_reads(tmp_path: Path) -> None:
    trainer(Local(), tmp_path, limit_train_batches=0).fit(grpo(), DataLoader(Endless(), batch_size=2))


def test_a_data_set_in_place_of_a_loader(tmp_path: Path) -> None:
    """Lightning would take each row for a batch."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "Sort 21: ", "answer": "1"}] * 2)
    for algorithm, kind in ((grpo(), "PromptData"), (SFT(), "CompletionData"), (DPO(), "PreferenceData")):
        with pytest.raises(ValueError, match=r"'prompt_ids'") as error:
            trainer(Local(), tmp_path).fit(algorithm, rows)
        assert str(error.value) == (
            "a row of Dataset has the columns ['answer', 'prompt'], and no 'prompt_ids': data modules encode "
            f"rows and make batches of them. Type trainer.fit(..., datamodule={kind}.from_rows(rows, "
            "batch_size=16))."
        )
