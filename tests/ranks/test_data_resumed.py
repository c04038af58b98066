"""Data under the stock Trainer: its runs go on from their checkpoints, with and without worker processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data import CompletionData, MixedData, PromptData, RowBatch, load_tokenizer

Numbered = Callable[[int], Path]
STEPS = 9


class Recorder(LightningModule):
    """Notes the row ids of every batch, as an algorithm would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[list[int]] = []
        self.beside: list[list[int]] = []
        self.validated: list[list[int]] = []

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer("embedded")

    def training_step(self, batch: RowBatch) -> Tensor:
        self.trained.append(batch["row_ids"].tolist())
        if "ptx" in batch:
            self.beside.append(batch["ptx"]["row_ids"].tolist())
        self.optimizers().step()  # type: ignore[union-attr]  # counts the step
        return self.weight.sum()

    def validation_step(self, batch: RowBatch) -> None:
        self.validated.append(batch["row_ids"].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.1)


def prompts(file: Path, *, workers: int = 0) -> PromptData:
    return PromptData(path=str(file), batch_size=3, val_rows=2, num_workers=workers)


def fit(
    data: LightningDataModule,
    directory: Path,
    *,
    checkpoint: Path | None = None,
    epoch_end: bool = False,
    limit: float = 1.0,
) -> Recorder:
    saving = ModelCheckpoint(
        directory,
        filename="{step}",
        save_top_k=-1,
        every_n_epochs=1 if epoch_end else None,
        every_n_train_steps=None if epoch_end else 1,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        limit_train_batches=limit,
        logger=False,
        callbacks=[saving],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    module = Recorder()
    trainer.fit(module, data, ckpt_path=checkpoint)
    return module


Resumed = Callable[..., Recorder]


@pytest.fixture
def check_resumes(tmp_path: Path) -> Resumed:
    """Run once, then again from each of its checkpoints, or from every few.

    In a chain, each run goes on from a checkpoint of the one before.
    """

    def check(
        make: Callable[[], LightningDataModule],
        *,
        every: int = 1,
        chain: bool = False,
        epoch_end: bool = False,
        limit: float = 1.0,
    ) -> Recorder:
        source = tmp_path / "whole"
        whole = fit(make(), source, epoch_end=epoch_end, limit=limit)
        names = sorted(file.name for file in source.glob("*.ckpt"))
        assert len(names) >= (2 if epoch_end else STEPS)
        for number, name in enumerate(names[::every]):
            step = int(name.removeprefix("step=").removesuffix(".ckpt"))
            directory = tmp_path / str(number)
            again = fit(make(), directory, checkpoint=source / name, epoch_end=epoch_end, limit=limit)
            assert again.trained == whole.trained[step:], name
            assert again.beside == whole.beside[step:], name
            source = directory if chain else source
        return whole

    return check


both = pytest.mark.parametrize("epoch_end", [False, True], ids=["after each step", "after each epoch"])


@pytest.mark.filterwarnings("ignore")
@both
def test_resume_of_shortened_epochs(numbered: Numbered, check_resumes: Resumed, epoch_end: bool) -> None:
    file = numbered(12)
    whole = check_resumes(lambda: prompts(file), epoch_end=epoch_end, limit=3)
    assert [ids[0] >> 32 for ids in whole.trained] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.filterwarnings("ignore")
@both
def test_resume_from_every_checkpoint(numbered: Numbered, check_resumes: Resumed, epoch_end: bool) -> None:
    file = numbered(12)  # 10 for training: batches of 3, 3, 3, 1 an epoch, and 2 held out
    whole = check_resumes(lambda: prompts(file), epoch_end=epoch_end)
    assert [len(ids) for ids in whole.trained] == [3, 3, 3, 1, 3, 3, 3, 1, 3]
    assert len({key for ids in whole.trained for key in ids}) == 23
    assert len({tuple(ids) for ids in whole.validated}) == 1


@pytest.mark.filterwarnings("ignore")
def test_other_rows_of_the_same_number_are_told_of_once(
    numbered: Numbered, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = numbered(12)
    fit(prompts(file), tmp_path / "whole")
    for text, told in ((file.read_text(), 0), (file.read_text().replace("7", "8"), 1)):
        file.write_text(text)
        fit(prompts(file), tmp_path / "again", checkpoint=tmp_path / "whole" / "step=3.ckpt")
        assert sum("the data has other rows" in said for said in caplog.messages) == told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("rows", "limit", "epoch_end"),
    [(12, 1.0, False), (12, 2, False), (11, 1.0, True), (12, 3, True)],
    ids=["a rest", "shortened", "no rest, after epochs", "shortened, after epochs"],
)
def test_resume_with_a_worker(
    numbered: Numbered, check_resumes: Resumed, rows: int, limit: float, epoch_end: bool
) -> None:
    file = numbered(rows)
    without = fit(prompts(file), file.parent / "without", limit=limit)
    whole = check_resumes(
        lambda: prompts(file, workers=1),
        every=1 if epoch_end else 3,
        chain=True,
        limit=limit,
        epoch_end=epoch_end,
    )
    assert whole.trained == without.trained


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("workers", "limit", "epoch_end"),
    [(0, 1.0, False), (0, 3, True), (1, 1.0, False)],
    ids=["after each step", "shortened, after each epoch", "with workers"],
)
def test_resume_of_two_modules(
    numbered: Numbered, check_resumes: Resumed, workers: int, limit: float, epoch_end: bool
) -> None:
    file = numbered(12)

    def mixed() -> MixedData:
        second = CompletionData(path=str(file), batch_size=5, val_rows=5, num_workers=workers)  # 5 and 2 rows
        return MixedData(main=prompts(file, workers=workers), ptx=second)

    every = 4 if workers else 1
    whole = check_resumes(mixed, epoch_end=epoch_end, every=every, chain=workers > 0, limit=limit)
    assert whole.trained == fit(prompts(file), file.parent / "alone", limit=limit).trained
    assert [len(ids) for ids in whole.beside] == [5, 2, 5, 2, 5, 2, 5, 2, 5]
    assert [{key >> 32 for key in ids} for ids in whole.beside] == [{n // 2} for n in range(STEPS)]
    assert len({tuple(ids) for ids in whole.validated}) == 1


def overfit(data: LightningDataModule, directory: Path, *, checkpoint: Path | None = None) -> Recorder:
    module = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=6,
        overfit_batches=2,
        logger=False,
        callbacks=[ModelCheckpoint(directory, filename="{step}", save_top_k=-1, every_n_train_steps=1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(module, data, ckpt_path=checkpoint)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_batches_come_again_and_again_to_be_overfitted(
    workers: int, numbered: Numbered, tmp_path: Path
) -> None:
    file = numbered(20)
    module = overfit(prompts(file, workers=workers), tmp_path / "whole")
    first = [key for ids in module.trained[:2] for key in ids]
    assert first == list(range(6))
    for epoch in range(3):  # the same rows, and draws of their own
        ids = [key for ids in module.trained[2 * epoch : 2 * epoch + 2] for key in ids]
        assert ids == [epoch << 32 | key for key in first]
    for step in (2, 3):
        saved = tmp_path / "whole" / f"step={step}.ckpt"
        again = overfit(prompts(file, workers=workers), tmp_path / f"{step}", checkpoint=saved)
        assert again.trained == module.trained[step:]
    mixed = MixedData(main=prompts(file), ptx=prompts(file))
    with pytest.raises(ValueError, match=r"trainer\.overfit_batches: a second data module"):
        overfit(mixed, tmp_path)
