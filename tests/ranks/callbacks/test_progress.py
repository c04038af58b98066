"""The bar's numbers are of the run: its epochs, its `max_steps`, the checkpoint that it goes on from."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar

from rlhf_lightning.callbacks import Progress
from tests.unit.callbacks.module import Tiny, data
from tests.unit.rlhf import Rlhf


class Noted(Progress):
    """Keeps what each epoch's bar says at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        bar = self.train_progress_bar
        self.said.append(f"{bar.description.strip()}: {bar.completed:.0f}/{bar.total:.0f}")
        super().on_train_epoch_end(trainer, pl_module)


def said(root: Path, *, ckpt_path: str | None = None, **limits: int) -> list[str]:
    bar = Noted()
    run = pl.Trainer(
        accelerator="cpu",
        callbacks=[bar, ModelCheckpoint(root, filename="third", every_n_train_steps=3, save_top_k=1)],
        logger=False,
        default_root_dir=root,
        enable_model_summary=False,
        **limits,  # type: ignore[arg-type]
    )
    run.fit(Tiny(), data(), ckpt_path=ckpt_path)
    return bar.said


def test_a_bar_is_of_an_epoch_or_what_max_steps_leaves_of_it(tmp_path: Path) -> None:
    assert said(tmp_path, max_steps=3) == ["Epoch 0: 3/3"]
    third = str(tmp_path / "third.ckpt")
    assert said(tmp_path, max_steps=5, ckpt_path=third) == ["Epoch 0: 5/5"]
    assert said(tmp_path, max_steps=11, ckpt_path=third) == ["Epoch 0: 8/8", "Epoch 1: 3/3"]
    assert said(tmp_path, max_epochs=2) == ["Epoch 0/1: 8/8", "Epoch 1/1: 8/8"]
    assert said(tmp_path, max_epochs=2, max_steps=9) == ["Epoch 0/1: 8/8", "Epoch 1/1: 1/1"]


def test_the_command_shows_it_unless_another_is_wanted(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[object] = []
    monkeypatch.setattr(pl.Trainer, "fit", lambda run, *_, **__: bars.append(type(run.progress_bar_callback)))
    for own in ([], ["--trainer.callbacks+=TQDMProgressBar"], ["--trainer.callbacks+=RichProgressBar"]):
        rlhf.run("fit", "--algo", "grpo", "--strategy", "local", *own)
    assert bars == [Progress, TQDMProgressBar, RichProgressBar]
