"""Processes killed, and calls that fail: what the user reads and what stays; nothing learned is lost."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from rlhf_lightning.algorithm import Columns
from rlhf_lightning.algos import PPO
from rlhf_lightning.commands import export
from rlhf_lightning.controller import RANK_ZERO, WorkerError, register
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Colocated
from rlhf_lightning.workers import Actor
from tests.ray.model import STEPS, Parameters, fit, furthest, ppo
from tests.ray.runs import Run, saved_step, write_config
from tests.unit.algos.short import trainer

LONG = 5
"""Iterations of the run that is killed twice: on a busy machine some pass before one is caught."""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Of a node whose head was killed: they look for it for a minute, and end."""
DEATH = r"^rlhf: error: (actor|critic|reference|reward)\[rank \d, device \d\]\.\w+: its process died"


def kill_a_worker(run: Run) -> None:
    """The user reads one message, soon, and nothing is left."""
    worker = run.held(after=1)
    began = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    code = run.wait()
    run.gone(within_s=30 - (time.monotonic() - began))
    said = run.output.read_text()
    assert code == 1, said
    assert len(re.findall(DEATH, said, re.MULTILINE)) == said.count("rlhf: error") == 1, said
    assert "Traceback" not in said


def kill_the_driver(run: Run, *, after: int) -> None:
    """Its last checkpoint stays."""
    worker = run.held(after=after)
    run.process.kill()
    os.kill(worker, signal.SIGCONT)
    assert run.wait() == -signal.SIGKILL
    assert after <= saved_step(run.checkpoints) < LONG


@pytest.mark.timeout(600)
def test_a_run_killed_twice_ends_like_an_uninterrupted_one(cluster: str, tiny: Path, tmp_path: Path) -> None:
    config, steps = write_config(tmp_path, tiny), ("--trainer.max_steps", str(LONG))
    with Run(config, *steps, "--strategy.devices", "2") as run:
        kill_a_worker(run)
    first = saved_step(run.checkpoints)
    assert 1 <= first < LONG - 1
    with Run(config, *steps, "--ckpt_path", "last") as run:
        kill_the_driver(run, after=first + 1)
        with Run(config, *steps, "--ckpt_path", "last", address=cluster) as last:
            assert last.wait() == 0, last.output.read_text()
        run.gone(within_s=30, besides=AGENTS)
    assert [path.name for path in last.checkpoints.iterdir()] == ["last.ckpt"]
    assert saved_step(last.checkpoints) == LONG
    alone = fit(ppo(tiny), Colocated(devices=1), tmp_path / "alone", steps=LONG)
    export.run([str(last.checkpoints / "last.ckpt"), str(tmp_path / "exported")])
    assert furthest(load_file(tmp_path / "exported" / "model.safetensors"), alone) < 1e-6


class Stop(Callback):
    """Fails once, when the first batch is about to be learned from."""

    stopped = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if not self.stopped:
            self.stopped = True
            raise KeyError("stopped on purpose")


def test_the_same_algorithm_fits_again_after_a_failure(
    alone: tuple[PPO, Parameters], tiny: Path, tmp_path: Path
) -> None:
    algorithm, stop = ppo(tiny), Stop()
    with pytest.raises(KeyError, match="stopped on purpose"):
        fit(algorithm, Colocated(devices=1), tmp_path, steps=STEPS, callbacks=[stop])
    with pytest.raises(RuntimeError, match="Actor is not placed yet"):
        algorithm.actor.export(directory=tmp_path)
    assert (
        furthest(fit(algorithm, Colocated(devices=1), tmp_path, steps=STEPS, callbacks=[stop]), alone[1])
        < 1e-5
    )


@dataclass(frozen=True, kw_only=True)
class FailingActor(Actor):
    """Has a method that does not work."""

    @register(transfer=RANK_ZERO)
    def fail(self) -> int:
        raise KeyError("failed on purpose")


class Unread(PPO):
    """A test of one's own, which reads nothing of what it asks for."""

    def test_step(self, batch: Columns, batch_idx: int) -> None:
        assert isinstance(self.actor, FailingActor)
        self.actor.fail()


def test_a_failed_call_that_nothing_reads_is_told(tiny: Path, tmp_path: Path) -> None:
    actor = FailingActor(path=str(tiny), sampling=Sampling(max_new_tokens=6))
    loader: DataLoader[str] = DataLoader(["Sort 21: "])  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match=r"actor\[rank 0, .*\]\.fail: .*failed on purpose"):
        trainer(Colocated(devices=1), tmp_path).test(Unread(actor=actor), dataloaders=loader)
