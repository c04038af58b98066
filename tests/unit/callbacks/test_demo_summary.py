from __future__ import annotations

import re
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar, TQDMProgressBar
from torch import Tensor

from rlhf_lightning.callbacks import DemoSummary
from tests.unit.callbacks.module import Tiny, data, fit, trainer_in

LINE = re.compile(r"demo: reward_first5=(\S+) reward_last5=(\S+) seconds=(\d+\.\d)")


def figures(text: str) -> tuple[float, float, float]:
    match = LINE.fullmatch(text.splitlines()[-1])
    assert match, text
    first, last, seconds = map(float, match.groups())
    return first, last, seconds


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], bar: type[ProgressBar]) -> None:
    """Also behind a progress bar, which writes to the same stream when it closes."""
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        callbacks=[DemoSummary(), bar()],
        max_steps=8,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        log_every_n_steps=1,
    )
    trainer.fit(Tiny(), data())
    first, last, seconds = figures(capsys.readouterr().out)
    assert first == pytest.approx(0.3)  # mean of 0.1 to 0.5
    assert last == pytest.approx(0.6)  # mean of 0.4 to 0.8
    assert 0 <= seconds < 60


def test_a_short_run_uses_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(trainer_in(tmp_path, [DemoSummary()], steps=2), Tiny())
    assert figures(capsys.readouterr().out)[:2] == (0.15, 0.15)


def test_a_second_run_has_rewards_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = DemoSummary()
    fit(trainer_in(tmp_path, [summary]), Tiny())
    fit(trainer_in(tmp_path, [summary], steps=2), Tiny())
    assert figures(capsys.readouterr().out)[:2] == (0.15, 0.15)


class Silent(Tiny):
    def training_step(self, batch: Tensor) -> Tensor:
        return self.weight.sum() * batch.sum()


def test_a_missing_metric_is_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(trainer_in(tmp_path, [DemoSummary()], steps=2), Silent())
    assert "reward_first5=nan reward_last5=nan" in capsys.readouterr().out


def test_first_steps_survive_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(trainer_in(tmp_path, [saver, DemoSummary()], checkpoints=True), Tiny())
    capsys.readouterr()
    trainer = trainer_in(tmp_path, [DemoSummary()], steps=6)
    fit(trainer, Tiny(), str(tmp_path / "step=3.ckpt"))
    first, last, _ = figures(capsys.readouterr().out)
    assert first == pytest.approx(0.3)  # steps 1 to 3 of the first run, 4 and 5 of the second
    assert last == pytest.approx(0.4)


class Failing(Tiny):
    def training_step(self, batch: Tensor) -> Tensor:
        raise RuntimeError("no")


def test_no_line_after_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="no"):
        fit(trainer_in(tmp_path, [DemoSummary()]), Failing())
    assert "demo:" not in capsys.readouterr().out


def test_no_line_after_a_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_in(tmp_path, [DemoSummary()]).validate(Tiny(), data(), verbose=False)
    assert "demo:" not in capsys.readouterr().out
