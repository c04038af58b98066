"""Under the stock Trainer and the command line's parser: resuming, the algorithm's tokenizer, options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data import PromptData, RowBatch, load_tokenizer

Numbered = Callable[[int], Path]
STEPS = 9


class Recorder(LightningModule):
    """Notes the row ids of every batch, as an algorithm would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[list[int]] = []
        self.validated: list[list[int]] = []

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer("embedded")

    def training_step(self, batch: RowBatch) -> Tensor:
        self.trained.append(batch["row_ids"].tolist())
        self.optimizers().step()  # type: ignore[union-attr]  # counts the step
        return self.weight.sum()

    def validation_step(self, batch: RowBatch) -> None:
        self.validated.append(batch["row_ids"].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.1)


def fit(
    file: Path,
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
    trainer.fit(module, PromptData(path=str(file), batch_size=3, val_rows=2), ckpt_path=checkpoint)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("epoch_end", [False, True], ids=["after each step", "after each epoch"])
def test_resume_of_shortened_epochs(numbered: Numbered, tmp_path: Path, epoch_end: bool) -> None:
    file = numbered(12)
    whole = fit(file, tmp_path / "whole", epoch_end=epoch_end, limit=3)
    assert [ids[0] >> 32 for ids in whole.trained] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for number, checkpoint in enumerate(sorted((tmp_path / "whole").glob("*.ckpt"))):
        step = int(checkpoint.stem.removeprefix("step="))
        again = fit(file, tmp_path / str(number), checkpoint=checkpoint, epoch_end=epoch_end, limit=3)
        assert again.trained == whole.trained[step:], checkpoint.name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("epoch_end", [False, True], ids=["after each step", "after each epoch"])
def test_resume_from_every_checkpoint(numbered: Numbered, tmp_path: Path, epoch_end: bool) -> None:
    file = numbered(12)  # 10 for training: batches of 3, 3, 3, 1 an epoch, and 2 held out
    whole = fit(file, tmp_path / "whole", epoch_end=epoch_end)
    assert [len(ids) for ids in whole.trained] == [3, 3, 3, 1, 3, 3, 3, 1, 3]
    assert len({key for ids in whole.trained for key in ids}) == 23
    assert len({tuple(ids) for ids in whole.validated}) == 1
    checkpoints = sorted((tmp_path / "whole").glob("*.ckpt"))
    assert len(checkpoints) >= (2 if epoch_end else STEPS)
    for number, checkpoint in enumerate(checkpoints):
        step = int(checkpoint.stem.removeprefix("step="))
        resumed = fit(file, tmp_path / str(number), checkpoint=checkpoint, epoch_end=epoch_end)
        assert resumed.trained == whole.trained[step:], checkpoint.name


def parse(*arguments: str) -> LightningDataModule:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data", required=True)
    module = parser.instantiate(parser.parse_args(list(arguments))).data
    assert isinstance(module, LightningDataModule)
    return module


def test_options_from_the_command_line(numbered: Numbered) -> None:
    data = parse(
        "--data", "PromptData", "--data.path", str(numbered(3)), "--data.batch_size=2", "--data.limit=2"
    )
    assert isinstance(data, PromptData)
    assert (data.batch_size, data.limit, data.shuffle) == (2, 2, True)
    gym = parse("--data=rlhf_lightning.data.ReasoningGymData", '--data.options={"max_word_len": 4}')
    assert vars(gym)["options"] == {"max_word_len": 4}
    with pytest.raises(ArgumentError, match="colour"):
        parse("--data", "TaskData", "--data.colour", "red")
    with pytest.raises(ArgumentError, match="path"):
        parse("--data", "PromptData")
