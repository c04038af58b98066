"""The trainer that a command line makes: its checkpoints and its loggers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger

from rlhf_lightning.callbacks import LastCheckpoint
from tests.unit.rlhf import FIT, SHORT, Rlhf

pytestmark = pytest.mark.usefixtures("in_own_directory")
WANDB = ("--trainer.logger", "WandbLogger", "--trainer.logger.offline", "true")


class StartedError(Exception):
    """The run is ready, and would begin."""


@pytest.fixture
def prepared(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """The trainer that a command line makes."""

    def prepare(*words: str) -> Trainer:
        made: list[Trainer] = []

        def begin(trainer: Trainer, *_: object, **__: object) -> None:
            made.append(trainer)
            raise StartedError

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "fit", begin)
            with pytest.raises(StartedError):
                rlhf.run(*words)
        return made[0]

    return prepare


def test_a_checkpoint_callback_of_the_users_own_stays(prepared: Callable[..., Trainer]) -> None:
    mine = ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=50")
    found, last = prepared(*FIT, *SHORT, *mine).checkpoint_callbacks
    assert type(found) is ModelCheckpoint
    assert found._every_n_train_steps == 50
    (usual,) = prepared(*FIT, *SHORT).checkpoint_callbacks
    assert type(last) is type(usual) is LastCheckpoint
    (beside,) = prepared(*FIT, *SHORT, "--trainer.callbacks+=Rollouts").checkpoint_callbacks
    assert type(beside) is LastCheckpoint
    assert vars(last)["dirpath"] == vars(usual)["dirpath"] == str(Path("runs/checkpoints").absolute())
    assert found.state_key != last.state_key
    (own,) = prepared(
        *FIT, *SHORT, "--trainer.callbacks+=LastCheckpoint", "--trainer.callbacks.directory=mine"
    ).checkpoint_callbacks
    assert vars(own)["dirpath"] == str(Path("mine").absolute())
    assert prepared(*FIT, *SHORT, "--trainer.enable_checkpointing", "false").checkpoint_callbacks == []


def test_a_configuration_may_hold_a_date(prepared: Callable[..., Trainer]) -> None:
    logger = (
        "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: ., version: 2026-01-05}}"
    )
    Path("mine.yaml").write_text(
        f"algo: ppo\ndata: taskdata\ntrainer: {{logger: {logger}}}\n", encoding="utf-8"
    )
    assert prepared("fit", "-c", "mine.yaml").loggers[0].version == "2026-01-05"


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        ((), "allow"),  # the name may be WANDB_RUN_ID
        (("--trainer.logger.version", "mine"), "allow"),
        (("--trainer.logger.id", "mine"), "allow"),
        (("--trainer.logger.version", "mine", "--trainer.logger.resume", "never"), "never"),
        (("--trainer.logger.version", "mine", "--trainer.logger.fork_from", "theirs?_step=3"), None),
    ],
)
def test_a_run_of_wandb_with_a_name_goes_on(
    prepared: Callable[..., Trainer], words: tuple[str, ...], resume: str | None
) -> None:
    """Without `allow`, which Lightning has set and the parser sets to null, wandb begins it anew."""
    (logger,) = prepared(*FIT, *SHORT, *WANDB, *words).loggers
    assert isinstance(logger, WandbLogger)
    assert logger._wandb_init["resume"] == resume


def test_what_a_variable_tells_wandb_is_not_replaced(
    prepared: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RESUME", "never")
    (logger,) = prepared(*FIT, *SHORT, *WANDB).loggers
    assert isinstance(logger, WandbLogger)
    assert logger._wandb_init["resume"] is None
