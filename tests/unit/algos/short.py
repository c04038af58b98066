"""GRPO of a small model for a few iterations in this process, and runs that end before they start."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning.pytorch as pl
import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO
from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.data import MixedData, RowData, TaskData
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Reward
from tests.unit.algos.small import write_model


class Started(Local):
    """Fails once it is to start."""

    def setup(self, trainer: pl.Trainer) -> None:
        raise RuntimeError("started")


@cache
def _small_model() -> TemporaryDirectory[str]:
    """The directory of a model, until Python ends."""
    directory = TemporaryDirectory()
    write_model(Path(directory.name))
    return directory


def grpo(kind: type[GRPO] = GRPO) -> GRPO:
    """Two answers of two tokens to each prompt, of a model that is computed in half the time of embedded."""
    return kind(
        actor=Actor(path=_small_model().name, sampling=Sampling(max_new_tokens=2)),
        reward=Reward(functions={"length": 1.0}),
        group_size=2,
    )


def trainer(strategy: Strategy, root: Path, *, steps: int = 1, **options: object) -> pl.Trainer:
    """One that leaves nothing, unless told so."""
    usual: dict[str, object] = {"enable_checkpointing": False, "limit_val_batches": 0, "logger": False}
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=steps,
        enable_progress_bar=False,
        default_root_dir=root,
        **{**usual, **options},  # type: ignore[arg-type]
    )


def go_on(
    algorithm: RLHFAlgorithm, data: RowData | MixedData, root: Path, *, steps: int, **options: object
) -> None:
    """Fit in this process from the last checkpoint, where there is one, with one after every iteration."""
    own = {"enable_checkpointing": True, "callbacks": [LastCheckpoint(root, every_n_steps=1)]}
    path = root / "last.ckpt"
    found = path if path.exists() else None
    trainer(Local(), root, steps=steps, **own, **options).fit(algorithm, datamodule=data, ckpt_path=found)


def refusal(
    algorithm: RLHFAlgorithm,
    root: Path,
    *,
    held_out: int = 2,
    limit: int | None = None,
    data: RowData | MixedData | None = None,
) -> str:
    """What an algorithm is refused with, or that it has started."""
    run = trainer(Started(), root, limit_val_batches=limit)
    with pytest.raises((ValueError, RuntimeError)) as error:
        run.fit(algorithm, datamodule=data or TaskData(batch_size=2, num_rows=4, num_val_rows=held_out))
    return str(error.value)
