"""Where commands look for a checkpoint, and what they say where there is none or nothing can be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_lightning import checkpoint
from tests.unit.rlhf import Rlhf

FIT = ("fit", "--algo", "ppo")
SHORT = ("--data.num_rows", "200", "--data.num_val_rows", "8")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_with_a_checkpoint_callback_of_the_users_own_goes_on(rlhf: Rlhf) -> None:
    mine = ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=50")
    local = ("--strategy", "local", "--trainer.logger", "false", "--data.batch_size", "2")
    words = (*FIT, *SHORT, *local, *mine, "--algo.actor.sampling.max_new_tokens", "2", "--ckpt_path", "last")
    code, _, err = rlhf.run(*words, "--trainer.max_steps", "1")
    assert code == 0, err
    place = Path("runs/checkpoints").absolute()
    assert f"rlhf: --ckpt_path last: {place} is not there. The run begins anew.\n" in err
    assert "save_last" not in err
    code, _, err = rlhf.run(*words, "--trainer.max_steps", "2")
    assert code == 0, err
    assert "begins anew" not in err
    assert checkpoint.read_state(place / "last.ckpt")["global_step"] == 2


def test_no_last_checkpoint_to_evaluate(rlhf: Rlhf) -> None:
    words = ("--algo", "ppo", *SHORT, "--strategy", "local", "--ckpt_path", "last")
    place = Path("runs/checkpoints").absolute()
    assert f"--ckpt_path last: {place} is not there. Type the path of one" in rlhf.refused("validate", *words)
    checkpoint.write_state(make(place / "step=3.ckpt"), {})
    assert f"{place} holds no last.ckpt, but step=3.ckpt. Type" in rlhf.refused("predict", *words)
    off = ("--trainer.enable_checkpointing", "false")
    assert "nothing is kept with enable_checkpointing false" in rlhf.refused("predict", *words, *off)


@pytest.mark.parametrize(("command", "logger"), [("fit", "true"), ("predict", "false")])
def test_a_directory_that_cannot_be_made(rlhf: Rlhf, command: str, logger: str) -> None:
    Path("file").touch()
    words = ("--strategy", "local", "--trainer.default_root_dir", "file/runs", "--trainer.logger", logger)
    message = rlhf.refused(command, "--algo", "ppo", *SHORT, *words)
    assert message.endswith(": Not a directory.")
    assert "file/runs" in message


def test_an_export_to_where_nothing_can_be_written(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"path": "embedded", "head": "lm", "dtype": "float32"}
    checkpoint.write_state(make(Path("last.ckpt")), {"models": {"actor": model}})
    Path("file").touch()
    assert rlhf.refused("export", "last.ckpt", "file/out") == "file/out: Not a directory."
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert rlhf.refused("export", "last.ckpt", "out") == "out: Permission denied."


def make(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory
