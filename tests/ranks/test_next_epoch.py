"""A run that goes on after a complete epoch begins the next one whole, with the data options of now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.data import CompletionData, MixedData, RowBatch, RowData, TaskData
from rlhf_lightning.strategies import Local
from tests.unit.algos.short import grpo, trainer
from tests.unit.algos.small import write_rows

Batches = list[tuple[list[int], list[int]]]
"""Row ids of each iteration, and those of its batch of ptx."""


class Noting(Callback):
    """Notes the rows of each iteration."""

    def __init__(self) -> None:
        self.seen: Batches = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: RowBatch, batch_idx: int
    ) -> None:
        ids = batch["ptx"]["row_ids"].tolist() if "ptx" in batch else []
        self.seen.append((batch["row_ids"].tolist(), ids))


def rows(**options: int | str) -> TaskData:
    """Five batches an epoch."""
    usual: dict[str, int | str] = {"batch_size": 2, "num_rows": 10, "num_val_rows": 2}
    return TaskData(**{**usual, **options})  # type: ignore[arg-type]


def fit(
    root: Path,
    data: RowData | MixedData | StatefulDataLoader,
    epochs: int,
    *,
    saving: ModelCheckpoint | None = None,
    steps: int = -1,
    **options: object,
) -> Batches:
    """Train up to an epoch, from the last checkpoint where there is one."""
    noting = Noting()
    own = {"enable_checkpointing": True, "callbacks": [noting, saving or LastCheckpoint(root)]}
    run = trainer(Local(), root, steps=steps, max_epochs=epochs, **own, **options)
    path = root / "last.ckpt"
    given = {"train_dataloaders" if isinstance(data, StatefulDataLoader) else "datamodule": data}
    run.fit(grpo(), **given, ckpt_path=path if path.exists() else None)  # type: ignore[arg-type]
    return noting.seen


def indices(batches: Batches, *, epoch: int) -> list[int]:
    """Which rows they were of, all in this epoch."""
    ids = [key for batch, _ in batches for key in batch]
    assert {key >> 32 for key in ids} == {epoch}
    return sorted(key & 0xFFFFFFFF for key in ids)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("validated", [0, 1], ids=["", "after a validation"])
@pytest.mark.parametrize("early", [False, True], ids=["saved at the end", "saved before the end"])
def test_one_that_is_longer_is_read_whole(validated: int, early: bool, tmp_path: Path) -> None:
    def go_on(epochs: int, **options: object) -> Batches:
        own = ModelCheckpoint(tmp_path, "last", every_n_train_steps=1, enable_version_counter=False)
        saving = own if early else LastCheckpoint(tmp_path)
        options = {"limit_val_batches": validated, **options}
        return fit(tmp_path, rows(), epochs, saving=saving, **options)  # type: ignore[arg-type]

    assert len(go_on(1, limit_train_batches=2)) == 2
    assert indices(go_on(2), epoch=1) == list(range(10))
    assert len(go_on(3, limit_train_batches=1)) == 1
    assert indices(go_on(4), epoch=3) == list(range(10))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "count", "iterations"),
    [
        ({"batch_size": 5}, 10, 2),
        ({"num_workers": 1}, 10, 5),
        ({"shuffle": False}, 10, 5),
        ({"num_rows": 13}, 13, 7),
        ({"num_rows": 3, "batch_size": 1}, 3, 3),
    ],
    ids=str,
)
def test_it_may_have_other_data(options: dict[str, int], count: int, iterations: int, tmp_path: Path) -> None:
    fit(tmp_path, rows(), 1)
    following = fit(tmp_path, rows(**options), 2)
    assert len(following) == iterations
    assert indices(following, epoch=1) == list(range(count))


def mixed(root: Path, *, beside: int = 2, **options: int) -> MixedData:
    """Seven rows beside the usual ones."""
    named: list[dict[str, object]] = [{"prompt": f"p{n}", "response": f"r{n}"} for n in range(7)]
    second = CompletionData(path=write_rows(root / "beside.jsonl", named), batch_size=beside)
    return MixedData(main=rows(**options), ptx=second)


@pytest.mark.filterwarnings("ignore")
def test_the_second_module_goes_on_in_its_rows(tmp_path: Path) -> None:
    first = fit(tmp_path, mixed(tmp_path), 1)
    following = fit(tmp_path, mixed(tmp_path, batch_size=5), 2)
    assert indices(following, epoch=1) == list(range(10))
    ids = [key for _, batch in first + following for key in batch]
    assert [key >> 32 for key in ids] == [0] * 7 + [1] * 6, "2, 2, 2, 1 and 2, then 2 and 2"
    assert len(set(ids)) == len(ids)
    with pytest.raises(ValueError, match=r"^data\.ptx\.batch_size=3: .*--data\.ptx\.batch_size 2\."):
        fit(tmp_path, mixed(tmp_path, beside=3), 3)


@pytest.mark.filterwarnings("ignore")
def test_the_second_module_may_come_and_go(tmp_path: Path) -> None:
    fit(tmp_path, rows(), 1)
    with_one = fit(tmp_path, mixed(tmp_path), 2)
    assert indices(with_one, epoch=1) == list(range(10))
    assert {key for _, batch in with_one for key in batch if not key >> 32} == set(range(7))
    assert indices(fit(tmp_path, rows(), 3), epoch=2) == list(range(10))


def own_loader() -> StatefulDataLoader:
    """Four batches of two rows, with the row ids 0 to 7 in this order."""
    data = rows(num_rows=8, shuffle=False, tokenizer="embedded")
    data.setup("fit")
    batches: list[RowBatch] = list(data.train_dataloader())
    for number, batch in enumerate(batches):
        batch["row_ids"] = torch.tensor([2 * number, 2 * number + 1])
    return StatefulDataLoader(batches, batch_size=None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [2, 4])
def test_a_loader_of_ones_own_begins_it_anew(limit: int, tmp_path: Path) -> None:
    uninterrupted = fit(tmp_path / "whole", own_loader(), 2, limit_train_batches=limit)
    first = fit(tmp_path, own_loader(), 1, limit_train_batches=limit)
    assert [ids for ids, _ in first] == [[0, 1], [2, 3], [4, 5], [6, 7]][:limit]
    following = fit(tmp_path, own_loader(), 2, limit_train_batches=limit)
    assert first + following == uninterrupted
    assert following == first


@pytest.mark.filterwarnings("ignore")
def test_a_loader_of_ones_own_goes_on_within_it(tmp_path: Path) -> None:
    assert len(fit(tmp_path, own_loader(), 1, steps=3)) == 3
    assert [ids for ids, _ in fit(tmp_path, own_loader(), 1)] == [[6, 7]]
