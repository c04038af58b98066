"""Calls of a trainer after a fit, whose models are gone with its devices."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from rlhf_lightning.algos import GRPO, SafeRLHF
from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.running import KLPenalty
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Cost, Reward
from tests.unit.algos import short
from tests.unit.algos.short import grpo, trainer


def spoilt(root: Path) -> tuple[GRPO, TaskData, pl.Trainer, float]:
    """An algorithm that has learned too fast in three iterations, and what it was worth then."""
    actor = Actor(optimizer=OptimizerSpec(lr=3e-2), sampling=Sampling(max_new_tokens=8))
    algorithm = GRPO(actor=actor, group_size=4)
    data = TaskData(batch_size=4, num_rows=16, num_val_rows=8)
    own = LastCheckpoint(root / "checkpoints", every_n_steps=1)
    run = trainer(Local(), root, steps=3, enable_checkpointing=True, limit_val_batches=None, callbacks=[own])
    run.fit(algorithm, datamodule=data)
    return (
        algorithm,
        data,
        run,
        run.validate(algorithm, data, ckpt_path="last", verbose=False)[0]["val/reward"],
    )


def test_what_was_learned_is_not_left_behind_in_silence(tmp_path: Path) -> None:
    algorithm, data, run, worth = spoilt(tmp_path)
    says = (
        r"^GRPO was trained for 3 iterations in this process\. .*: trainer\.{}\(\.\.\., ckpt_path=\"last\"\)"
    )
    for name in ("fit", "validate", "predict"):
        with pytest.raises(ValueError, match=says.format(name)):
            getattr(run, name)(algorithm, datamodule=data)
    fresh = GRPO(actor=Actor(sampling=Sampling(max_new_tokens=8)), group_size=4)
    (before,) = run.validate(fresh, data, verbose=False)
    assert before["val/reward"] != worth
    (again,) = run.validate(algorithm, data, ckpt_path="last", verbose=False)
    assert again["val/reward"] == worth
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(algorithm, datamodule=data, ckpt_path="last")
    assert (run.global_step, algorithm.iterations_here) == (4, 4)


class Raises(pl.Callback):
    """Ends a run by an error, and has one of its own when it hears of that."""

    def on_train_batch_start(self, *_: object, **__: object) -> None:
        raise RuntimeError

    def on_exception(self, *_: object) -> None:
        """Raise."""
        raise LookupError


@pytest.mark.parametrize(("same", "anew"), [(True, False), (False, False), (False, True)])
def test_what_a_run_has_left_is_released_when_the_next_begins(
    tmp_path: Path, *, same: bool, anew: bool
) -> None:
    """Lightning releases nothing where `on_exception` raises, and the next run had no room beside it."""
    algorithm, data = grpo(), TaskData(batch_size=2, num_rows=4, num_val_rows=0)
    run = trainer(Local(), tmp_path, callbacks=[Raises()])
    with pytest.raises(LookupError):
        run.fit(algorithm, datamodule=data)
    left = run.strategy.transport  # type: ignore[attr-defined]
    if same:
        run.callbacks.pop(0)  # type: ignore[attr-defined]
    again = run if same else trainer(Local(), tmp_path)
    again.fit(grpo() if anew else algorithm, datamodule=data)
    assert left.closed
    assert again.strategy.transport is None  # type: ignore[attr-defined]


class Nested(pl.Callback):
    """Fits another algorithm within a run."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object, **__: object) -> None:
        transport = trainer.strategy.transport  # type: ignore[attr-defined]
        other = short.trainer(Local(), Path(trainer.default_root_dir) / "other")
        with suppress(ValueError):  # two have no room in one process, without Ray
            other.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=0))
        assert not transport.closed


def test_a_run_within_another_takes_nothing_from_it(tmp_path: Path) -> None:
    run = trainer(Local(), tmp_path, callbacks=[Nested()])
    run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=0))
    assert run.global_step


@pytest.mark.parametrize("keeps", [True, False])
def test_what_there_is_to_go_on_from_is_named(tmp_path: Path, *, keeps: bool) -> None:
    keeper = [pl.callbacks.ModelCheckpoint(tmp_path / "own", every_n_train_steps=1)] if keeps else []
    run = trainer(Local(), tmp_path, enable_checkpointing=keeps, callbacks=keeper, limit_val_batches=1)
    algorithm, data = grpo(), TaskData(batch_size=2, num_rows=4, num_val_rows=2)
    run.fit(algorithm, datamodule=data)
    with pytest.raises(ValueError, match=r"devices, and would be .*") as caught:
        run.validate(algorithm, datamodule=data, ckpt_path="last" if keeps else None)
    named = re.search(r'trainer\.validate\(\.\.\., ckpt_path="(.*)"\), or give a new GRPO', str(caught.value))
    if named is None:
        assert not keeps
        assert 'Trainer(callbacks=[LastCheckpoint("checkpoints")])' in str(caught.value)
    else:
        run.validate(algorithm, datamodule=data, ckpt_path=named[1], verbose=False)


class Fails(GRPO):
    """Fails in its first iteration, once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fails = True

    def step(self, batch: Batch) -> Metrics:
        if self.fails:
            self.fails = False
            raise KeyError("out of luck")
        return super().step(batch)


def test_who_has_learned_nothing_may_begin_again(tmp_path: Path) -> None:
    data = TaskData(batch_size=4, num_rows=16, num_val_rows=2)
    actor = Actor(sampling=Sampling(max_new_tokens=2))
    unlucky = Fails(actor=actor, group_size=2)
    with pytest.raises(KeyError, match="out of luck"):
        trainer(Local(), tmp_path).fit(unlucky, datamodule=data)
    trainer(Local(), tmp_path).fit(unlucky, datamodule=data)
    tried = GRPO(actor=actor, group_size=2)
    for options in ({"fast_dev_run": True}, {}):
        trainer(Local(), tmp_path, **options).fit(tried, datamodule=data)
    assert (unlucky.iterations_here, tried.iterations_here) == (1, 1)


class Fickle(SafeRLHF):
    """Fails in the iterations that it is told to, once it has changed its weights of divergence and cost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fails = False

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        found = super().compute_advantage(batch)
        if self.fails:
            raise KeyError("out of luck")
        return found


def fickle() -> Fickle:
    """With a weight that adapts fast."""
    return Fickle(
        actor=Actor(sampling=Sampling(max_new_tokens=2)),
        reward=Reward(functions={"length": 1.0}),
        cost=Cost(functions={"length": 1.0}),
        kl=KLPenalty(coef=0.1, target=1.0, horizon=10.0),
        window=4,
    )


class Begins(pl.Callback):
    """Notes what an algorithm knows as its training starts."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.known = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    """Names of tensors that are not the same."""
    assert one.keys() == other.keys()
    return {n for n, tensor in one.items() if not torch.equal(tensor.nan_to_num(), other[n].nan_to_num())}


LEARNED = {"running.kl_coef", "log_multiplier", "costs"}


@pytest.mark.parametrize("before", ["fast_dev_run", "failure", "validation"])
def test_who_begins_again_begins_from_the_options(before: str, tmp_path: Path) -> None:
    data, algorithm, begins = TaskData(batch_size=4, num_rows=16, num_val_rows=2), fickle(), Begins()
    fresh = {name: tensor.clone() for name, tensor in algorithm.state_dict().items()}
    if before == "fast_dev_run":
        trainer(Local(), tmp_path, fast_dev_run=True).fit(algorithm, datamodule=data)
    elif before == "failure":
        algorithm.fails = True
        with pytest.raises(KeyError, match="out of luck"):
            trainer(Local(), tmp_path).fit(algorithm, datamodule=data)
        algorithm.fails = False
    else:
        own = LastCheckpoint(tmp_path)
        run = trainer(Local(), tmp_path, enable_checkpointing=True, callbacks=[own])
        run.fit(fickle(), datamodule=data)
        trainer(Local(), tmp_path, limit_val_batches=None).validate(algorithm, data, own.path, verbose=False)
    assert differ(algorithm.state_dict(), fresh) == LEARNED
    trainer(Local(), tmp_path, callbacks=[begins]).fit(algorithm, datamodule=data)
    assert not differ(begins.known, fresh)


def test_who_goes_on_knows_what_the_checkpoint_does(tmp_path: Path) -> None:
    data, algorithm = TaskData(batch_size=4, num_rows=16, num_val_rows=0), fickle()
    own, begins = LastCheckpoint(tmp_path), Begins()
    run = trainer(Local(), tmp_path, enable_checkpointing=True, callbacks=[own])
    run.fit(algorithm, datamodule=data)
    learned = {name: tensor.clone() for name, tensor in algorithm.state_dict().items()}
    assert differ(learned, fickle().state_dict()) == LEARNED
    for goes_on in (algorithm, fickle()):
        again = trainer(Local(), tmp_path, steps=2, callbacks=[begins])
        again.fit(goes_on, datamodule=data, ckpt_path=own.path)
        assert not differ(begins.known, learned)


class Full(CSVLogger):
    """On a disk that is full."""

    def save(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_logger_that_fails_once_more_as_it_ends_leaves_no_devices(tmp_path: Path) -> None:
    run = trainer(Local(), tmp_path, logger=Full(tmp_path), log_every_n_steps=1)
    algorithm, data = grpo(), TaskData(batch_size=2, num_rows=2, num_val_rows=0)
    with pytest.raises(OSError, match="No space left"):
        run.fit(algorithm, datamodule=data)
    assert isinstance(run.strategy, Local)
    assert run.strategy.transport is None
    trainer(Local(), tmp_path).fit(algorithm, datamodule=data)
