from __future__ import annotations

import struct
from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from rlhf_lightning.callbacks import RewardCurve
from tests.unit.callbacks.module import Tiny, fit, trainer_in


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


class Watch(Callback):
    """Notes at which steps the picture is there, and takes it away."""

    def __init__(self, picture: Path) -> None:
        self.picture = picture
        self.steps: list[int] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self.picture.exists():
            self.steps.append(trainer.global_step)
            self.picture.unlink()


def test_points_and_picture(tmp_path: Path) -> None:
    curve = RewardCurve()
    fit(trainer_in(tmp_path, [curve]), Tiny())
    points = curve.state_dict()
    assert [step for step, _ in points["reward/mean"]] == [1, 2, 3, 4]
    assert [value for _, value in points["reward/mean"]] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert points["val/reward"] == [(2, 2.0), (4, 4.0)]  # not the sanity check's, and once a validation
    assert png_size(tmp_path / "reward.png") == (840, 480)


def test_pictures_in_between(tmp_path: Path) -> None:
    picture = tmp_path / "deep" / "mine.png"
    watch = Watch(picture)
    fit(trainer_in(tmp_path, [RewardCurve(every_n_steps=3, path=str(picture)), watch], steps=8), Tiny())
    assert watch.steps == [3, 6]
    assert picture.exists()


def test_a_resumed_run_has_the_whole_curve(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(trainer_in(tmp_path, [RewardCurve(), saver], checkpoints=True), Tiny())
    curve = RewardCurve(["reward/mean"])
    trainer = trainer_in(tmp_path, [curve], steps=6)
    fit(trainer, Tiny(), str(tmp_path / "step=3.ckpt"))
    assert [*curve.state_dict()] == ["reward/mean"], "the other one is not drawn any more"
    assert [step for step, _ in curve.state_dict()["reward/mean"]] == [1, 2, 3, 4, 5, 6]


def test_a_second_run_has_a_curve_of_its_own(tmp_path: Path) -> None:
    curve = RewardCurve()
    fit(trainer_in(tmp_path, [curve]), Tiny())
    fit(trainer_in(tmp_path, [curve], steps=3, interval=3), Tiny())
    assert [step for step, _ in curve.state_dict()["val/reward"]] == [3]


def test_a_trainer_that_goes_on_keeps_its_curve(tmp_path: Path) -> None:
    curve = RewardCurve()
    trainer = trainer_in(tmp_path, [curve])
    fit(trainer, module := Tiny())
    trainer.fit_loop.epoch_loop.max_steps = 6
    fit(trainer, module)
    assert [step for step, _ in curve.state_dict()["reward/mean"]] == [1, 2, 3, 4, 5, 6]


def test_an_unknown_metric_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"'reward/maen'.*Logged were \['reward/mean'"):
        fit(trainer_in(tmp_path, [RewardCurve(["reward/maen"])]), Tiny())
    assert not (tmp_path / "reward.png").exists()


def test_fast_dev_run_leaves_nothing(tmp_path: Path) -> None:
    fit(trainer_in(tmp_path, [RewardCurve()], fast_dev_run=True), Tiny())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metrics", [(), "reward/mean"])
def test_refusals(metrics: tuple[str, ...] | str) -> None:
    with pytest.raises(ValueError, match=r"name a list, as \['reward/mean'\]"):
        RewardCurve(metrics)
