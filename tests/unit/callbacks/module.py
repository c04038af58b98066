"""A module as small as can be that logs a reward and hands out samples, and a real Trainer for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.utils.data import DataLoader

PROMPTS = ["sort <b>3 1 2</b> & more", "second\nline"]
RESPONSES = ["1 2 3</pre><script>alert(1)</script>", "\x00\x1b[31m\udc80 \u00fc"]
SAMPLES = {"prompts": PROMPTS, "responses": RESPONSES, "scores": [1.0, 0.25]}


class Tiny(LightningModule):
    """Logs `reward/mean` = 0.1 * step, and `val/reward`; validates with the outputs given."""

    def __init__(self, outputs: STEP_OUTPUT = SAMPLES) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.outputs = outputs

    def training_step(self, batch: Tensor) -> Tensor:
        self.log("reward/mean", 0.1 * (self.global_step + 1))
        return self.weight.sum() * batch.sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> STEP_OUTPUT:
        self.log("val/reward", float(self.global_step))
        return self.outputs

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_in(
    root: Path,
    callbacks: Sequence[Callback],
    *,
    steps: int = 4,
    interval: int | timedelta = 2,
    loggers: Sequence[Logger] = (),
    fast_dev_run: bool = False,
    checkpoints: bool = False,
) -> Trainer:
    """Validate every second step, or after another interval, with two batches."""
    return Trainer(
        default_root_dir=root,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=list(loggers),
        max_steps=steps,
        val_check_interval=interval,
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        log_every_n_steps=1,
        fast_dev_run=fast_dev_run,
        enable_checkpointing=checkpoints,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def data() -> DataLoader[Tensor]:
    return DataLoader(torch.ones(8, 1))  # type: ignore[arg-type]


def fit(trainer: Trainer, module: Tiny, checkpoint: str | None = None) -> Mapping[str, Tensor]:
    trainer.fit(module, data(), data(), ckpt_path=checkpoint)
    return trainer.callback_metrics
