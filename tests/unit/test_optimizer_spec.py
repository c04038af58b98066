"""What an optimizer's options may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from rlhf_lightning.data import TaskData
from rlhf_lightning.optimizer import RemoteOptimizer
from rlhf_lightning.spec import OptimizerSpec
from rlhf_lightning.strategies import Local
from tests.logged import csv_file
from tests.unit.algos.short import grpo, trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"optimizer\.lr=-1\.0: .*Try 1e-6"),
        ({"betas": (0.9, 1.0)}, r"optimizer\.betas=\(0\.9, 1\.0\): .*Try 0\.9 and 0\.999"),
        ({"betas": (-0.1, 0.9)}, r"optimizer\.betas="),
        ({"eps": 0.0}, r"optimizer\.eps=0\.0: .*Try 1e-8"),
        ({"weight_decay": -0.1}, r"optimizer\.weight_decay=-0\.1: use 0"),
        ({"grad_clip": -1.0}, r"optimizer\.grad_clip=-1\.0: use 0"),
        ({"warmup_steps": -1}, r"optimizer\.warmup_steps=-1: use 0"),
        (
            {"warmup_ratio": 1.0, "total_steps": 9},
            r"warmup_ratio=1\.0 with warmup_steps=0: .*\[0, 1\), in pl",
        ),
        ({"warmup_ratio": -0.1, "total_steps": 9}, r"warmup_ratio=-0\.1 "),
        (
            {"warmup_ratio": 0.1, "warmup_steps": 1, "total_steps": 9},
            r"warmup_ratio=0\.1 with warmup_steps=1: .*leave warmup_steps out\.$",
        ),
        (
            {"warmup_ratio": 0.1},
            r"schedule=constant with total_steps=0, warmup_steps=0 and warmup_ratio=0\.1: nothing is left",
        ),
        (
            {"warmup_ratio": 0.1, "total_steps": 9, "min_lr_ratio": 0.1},
            r"min_lr_ratio=0\.1 with schedule=const",
        ),
        ({"total_steps": 100}, r"total_steps=100 with schedule=constant: .*linear or cosine"),
        ({"min_lr_ratio": 0.1}, r"min_lr_ratio=0.1 with schedule=constant: .*linear or cosine"),
        ({"min_lr_ratio": 2, "schedule": "linear", "total_steps": 9}, r"min_lr_ratio=2: .*\[0, 1\]. Try 0.1"),
        (
            {"schedule": "linear", "warmup_steps": 5, "total_steps": 5},
            r"total_steps=5, warmup_steps=5 and .*: nothing .*\(answers, or pairs, of an iteration / mini",
        ),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerSpec(**options)  # type: ignore[arg-type]


def test_the_edges_are_taken() -> None:
    OptimizerSpec(lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, grad_clip=0.0)
    OptimizerSpec(schedule="cosine", warmup_steps=4, total_steps=5)
    assert OptimizerSpec(warmup_ratio=0.95, total_steps=20).warmup == 19


def test_the_rates_that_loggers_see() -> None:
    warm, steady = OptimizerSpec(lr=1.0, warmup_steps=9), OptimizerSpec(lr=0.5)
    optimizer = RemoteOptimizer({"actor": warm, "critic": steady})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    optimizer.show({"actor": 0.2})
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.5]


def test_what_else_monitors_of_rates_log(tmp_path: Path) -> None:
    shown = LearningRateMonitor(logging_interval="step", log_momentum=True, log_weight_decay=True)
    logger = CSVLogger(tmp_path, name="", version="")
    algorithm = grpo()
    optimizer = OptimizerSpec(betas=(0.8, 0.99), weight_decay=0.25)
    algorithm.actor = replace(algorithm.actor, optimizer=optimizer)
    run = trainer(Local(), tmp_path, logger=logger, callbacks=[shown], log_every_n_steps=1)
    run.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=4))
    table = csv_file(tmp_path)
    assert table["lr-RemoteOptimizer/actor-momentum"] == [0.8]
    assert table["lr-RemoteOptimizer/actor-weight_decay"] == [0.25]
