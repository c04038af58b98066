"""Files that are there as a whole or not at all."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from rlhf_lightning.callbacks import LastCheckpoint, Rollouts, SampleTable
from rlhf_lightning.data import TaskData
from rlhf_lightning.output import checkpoint_directories, whole
from rlhf_lightning.strategies import Local
from tests.unit.algos.short import Started, grpo, trainer
from tests.unit.rlhf import FIT, SHORT, Rlhf


@contextmanager
def full_at_ten() -> Iterator[None]:
    """Within this context a file may have ten bytes, as if the disk were full: also pytest's own output."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_it_replaces_one_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("earlier")
    with whole(path) as file:
        file.write("later")
        assert path.read_text() == "earlier"
    assert path.read_text() == "later"
    assert [*tmp_path.iterdir()] == [path]


def test_a_disk_that_is_full_keeps_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("earlier")
    with pytest.raises(OSError, match=re.escape(str(path))), full_at_ten(), whole(path) as file:
        file.write("later than that")
    assert path.read_text() == "earlier"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("kind", [Rollouts, SampleTable])
def test_a_callback_names_its_file_and_leaves_no_part_of_it(
    kind: type[Rollouts | SampleTable], tmp_path: Path
) -> None:
    directory, data = tmp_path / "out", TaskData(batch_size=1, num_rows=1, num_val_rows=1)
    run = trainer(Local(), tmp_path, callbacks=[kind(directory=str(directory))], limit_val_batches=1)
    algorithm = grpo()
    with pytest.raises(OSError, match=re.escape(f"{directory}/step-000001.")), full_at_ten():
        run.fit(algorithm, datamodule=data)
    assert not [*directory.iterdir()]


def test_nothing_is_left_of_what_fails_as_it_is_written(tmp_path: Path) -> None:
    def fails() -> None:
        with whole(tmp_path / "lines.jsonl") as file:
            file.write("a part")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not [*tmp_path.iterdir()]


def test_where_a_run_writes_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    best, unplaced = ModelCheckpoint("best"), ModelCheckpoint(monitor="y")
    keepers: list[Callback] = [LastCheckpoint(tmp_path / "last"), best, ModelCheckpoint("best", monitor="x")]

    def found(*, state: TrainerFn | None = TrainerFn.FITTING, once: bool = False) -> dict[Path, str]:
        run = pl.Trainer(accelerator="cpu", callbacks=[*keepers, unplaced], logger=False, fast_dev_run=once)
        run.state.fn = state
        return checkpoint_directories(run)

    assert [*found().items()] == [
        (tmp_path / "last", "LastCheckpoint"),
        (tmp_path / "best", "ModelCheckpoint"),
    ]
    assert found(state=TrainerFn.VALIDATING) == found(once=True) == checkpoint_directories(None) == {}


@pytest.mark.parametrize(
    ("option", "root", "folder"),
    [
        ("trainer.default_root_dir", "memory://runs", None),
        ("ModelCheckpoint.dirpath", "runs", "memory://best"),
    ],
)
def test_a_store_is_no_disk(
    option: str, root: str, folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would take them, and the files go below a new folder `memory:`."""
    monkeypatch.chdir(tmp_path)
    run = pl.Trainer(
        accelerator="cpu",
        strategy=Started(),
        default_root_dir=root,
        callbacks=[ModelCheckpoint(folder)],
        logger=False,
    )
    algorithm, data = grpo(), TaskData(batch_size=1, num_rows=1)
    with pytest.raises(
        ValueError, match=rf"^{option}={folder or root}: .*to a disk.*the store is mounted\.$"
    ):
        run.fit(algorithm, datamodule=data)
    assert not [*tmp_path.iterdir()]


def test_the_command_asks_no_store(rlhf: Rlhf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that reads one, as here, Lightning would fail as it looks for a checkpoint."""
    monkeypatch.chdir(tmp_path)
    said = rlhf.refused(*FIT, *SHORT, "--trainer.default_root_dir", "s3://bucket/runs")
    assert said.startswith("trainer.default_root_dir=s3://bucket/runs: "), said
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", [Rollouts, SampleTable])
def test_a_callback_makes_no_folder_of_a_stores_name(
    kind: type[Rollouts | SampleTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = trainer(Started(), tmp_path, callbacks=[kind(directory="s3://bucket/a")], limit_val_batches=1)
    told = rf"^{kind.__name__}: directory=s3:/bucket/a: is in a store, .* the store is mounted\.$"
    with pytest.raises(ValueError, match=told):
        run.fit(grpo(), datamodule=TaskData(batch_size=1, num_rows=1, num_val_rows=1))
    assert not [*tmp_path.iterdir()]
