"""Loaders that cannot work, and rows in place of a loader, are refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from rlhf_lightning.algorithm import Columns
from rlhf_lightning.algos import DPO, GRPO, SFT
from rlhf_lightning.data import TaskData
from rlhf_lightning.strategies import Local
from rlhf_lightning.strategy import Strategy
from tests.unit.algos.short import grpo, trainer


@pytest.fixture(autouse=True)
def starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would start a device says so."""

    def start(strategy: Strategy, roles: object) -> None:
        raise KeyError("it would start")

    monkeypatch.setattr(Local, "_launch", start)


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


def test_a_run_without_data(tmp_path: Path) -> None:
    run = trainer(Local(), tmp_path)
    for task, name in ((run.fit, "fit"), (run.validate, "validate"), (run.predict, "predict")):
        with pytest.raises(
            ValueError, match=rf"^trainer\.{name}: there are no data\. Type trainer\.{name}\("
        ):
            task(grpo())


class Training(LightningDataModule):
    """Has rows to train on alone."""

    def train_dataloader(self) -> DataLoader[str]:
        """Some."""
        return DataLoader(Counted(), batch_size=2)


def test_a_data_module_without_the_loader_that_is_read(tmp_path: Path) -> None:
    run = trainer(Local(), tmp_path, limit_val_batches=1)
    for task, kind in ((run.validate, "val"), (run.predict, "predict")):
        with pytest.raises(
            ValueError, match=rf"^Training has no {kind}_dataloader, and \w+ reads it\. Write"
        ):
            task(grpo(), datamodule=Training())


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


def test_rows_in_place_of_a_loader(tmp_path: Path) -> None:
    row = {"prompt": "Sort 21: ", "answer": "1"}
    for rows in ([row], [row, row], [[row, row]]):
        with pytest.raises(
            ValueError, match=r"^a row has the columns \['answer', 'prompt'\], and no 'prompt"
        ):
            trainer(Local(), tmp_path).fit(grpo(), rows)


class Indexed(GRPO):
    """Takes the batches of several loaders."""

    def validation_step(self, batch: Columns, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Answer nothing."""


def test_several_loaders_for_a_step_that_takes_one(tmp_path: Path) -> None:
    """Lightning would refuse them with all models loaded."""
    first, second = (DataLoader(Counted(), batch_size=2) for _ in range(2))
    for name, loaders in (("validation_step", [first, second]), ("predict_step", {"a": first, "b": second})):
        run = trainer(Local(), tmp_path, limit_val_batches=1)
        with pytest.raises(ValueError, match=rf"^GRPO.{name} takes .*, and there are 2\. "):
            (run.predict if name == "predict_step" else run.validate)(grpo(), loaders)
    with pytest.raises(ValueError, match=r"^GRPO\.validation_step takes"):
        trainer(Local(), tmp_path, limit_val_batches=1).fit(grpo(), first, [first, second])
    together = CombinedLoader([first, second], "min_size")
    for kind, taken in ((Indexed, [first, second]), (GRPO, together)):
        with pytest.raises(KeyError, match="it would start"):
            trainer(Local(), tmp_path, limit_val_batches=1).fit(grpo(kind), first, taken)


class Tested(GRPO):
    """Has a test of its own."""

    def test_step(self, batch: Columns, batch_idx: int) -> None:
        """Answer nothing."""


def test_a_test_of_ones_own_has_its_own_loaders(tmp_path: Path) -> None:
    first, second = (DataLoader(Counted(), batch_size=2) for _ in range(2))
    with pytest.raises(KeyError, match="it would start"):
        trainer(Local(), tmp_path).test(grpo(Tested), first)
    with pytest.raises(ValueError, match=r"^Tested\.test_step takes the batches of one loader"):
        trainer(Local(), tmp_path).test(grpo(Tested), [first, second])
    with pytest.raises(ValueError, match=r"^trainer\.test: there are no data\. .*, dataloaders=\.\.\.\): "):
        trainer(Local(), tmp_path).test(grpo(Tested), datamodule=TaskData(num_rows=8, num_val_rows=2))
    with pytest.raises(ValueError, match=r"^trainer\.test: GRPO has no test_step\. Type trainer\.validate, "):
        trainer(Local(), tmp_path).test(grpo(), first)


class Compared(Tested):
    """The test has the models of a validation of one's own."""

    validates = ("reference",)


def test_a_test_of_ones_own_has_the_models_of_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(strategy: Strategy, roles: dict[str, object]) -> None:
        raise KeyError(" ".join(roles))

    monkeypatch.setattr(Local, "_launch", start)
    for kind, models in ((Tested, "actor reward"), (Compared, "actor reference reward")):
        with pytest.raises(KeyError, match=f"^'{models}'$"):
            trainer(Local(), tmp_path).test(grpo(kind), DataLoader(Counted(), batch_size=2))
