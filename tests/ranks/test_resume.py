"""Runs that cannot go on from a checkpoint are refused before any device starts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import pytest
import torch

from rlhf_lightning import checkpoint as files
from rlhf_lightning import directories, resume
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import SFT, OnlineDPO
from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.checkpoint import columns_of
from rlhf_lightning.controller import Batch, WorkerGroup
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.controller.transport import Transport
from rlhf_lightning.data import TaskData
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.strategies import Local, OneStepOff
from rlhf_lightning.workers import Actor, Ahead, Critic, Role
from tests.unit.algos.short import Started, grpo, trainer


def rows(**options: object) -> TaskData:
    """Three batches an epoch."""
    usual: dict[str, object] = {"batch_size": 2, "num_rows": 6, "num_val_rows": 0}
    return TaskData(**{**usual, **options})  # type: ignore[arg-type]


def checkpoint(root: Path, *, steps: int) -> Path:
    """That of a run of so many iterations."""
    own = LastCheckpoint(root)
    run = trainer(Local(), root, steps=steps, callbacks=[own], enable_checkpointing=True)
    run.fit(grpo(), datamodule=rows())
    return own.path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one of three iterations."""
    return checkpoint(tmp_path_factory.mktemp("run"), steps=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "started"),
        ({"batch_size": 3}, r"data\.batch_size=3: .* begun with 2\. Resume with --data\.batch_size 2\."),
        ({"num_workers": 1}, r"data\.num_workers=1: .*Resume with --data\.num_workers 0"),
        ({"shuffle": False}, r"data\.shuffle=false: .*Resume with --data\.shuffle true"),
        ({"num_rows": 8}, "in the middle of 6 rows, the data has 8 now"),
    ],
)
def test_other_rows_than_those_of_the_epoch(
    written: Path, options: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=says):
        trainer(Started(), tmp_path, steps=3).fit(grpo(), datamodule=rows(**options), ckpt_path=written)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("state_dict", 1),
        ("loops", "lost"),
        ("callbacks", 1),
        ("optimizer_states", None),  # as ModelCheckpoint(save_weights_only=True) leaves them out
    ],
)
def test_a_state_without_one_of_its_parts(written: Path, part: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    shutil.copytree(written, path)
    files.write_state(path, {**files.read_state(path), part: value})
    with pytest.raises(ValueError, match=rf"{path}: its trainer\.json has no {part}: .*another checkpoint"):
        trainer(Started(), tmp_path, steps=3).fit(grpo(), datamodule=rows(), ckpt_path=path)


class Starting(Local):
    """Fails where it would start devices."""

    def start(self, roles: Mapping[str, Role]) -> dict[str, Placement]:
        raise RuntimeError("started")


@pytest.mark.parametrize("limits", [{"max_steps": 0}, {"max_epochs": 0}, {"limit_train_batches": 0}], ids=str)
def test_nothing_to_train_starts_nothing(
    limits: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
    run = pl.Trainer(strategy=Starting(), accelerator="cpu", default_root_dir=tmp_path, **usual, **limits)  # type: ignore[arg-type]
    run.fit(grpo(), datamodule=rows())
    assert (run.state.status, run.global_step) == ("finished", 0)
    if "limit_train_batches" in limits:  # Lightning says why in the other cases
        assert "limit_train_batches=0: nothing is learned. Type 1 or more, or leave it out." in caplog.text


def test_a_run_that_is_done_starts_nothing(written: Path, tmp_path: Path) -> None:
    run = trainer(Starting(), tmp_path, steps=1)
    run.fit(grpo(), datamodule=rows(), ckpt_path=written)
    assert (run.state.status, run.global_step) == ("finished", 1)
    with pytest.raises(RuntimeError, match="started"):
        trainer(Starting(), tmp_path, steps=2).fit(grpo(), datamodule=rows(), ckpt_path=written)


class Overtaken(Local):
    """Starts its devices just when the run that wrote the checkpoint writes the next one."""

    checkpoint: str = ""

    def start(self, roles: Mapping[str, Role]) -> dict[str, Placement]:
        """Replace it first."""
        with directories.replacing(Path(self.checkpoint)) as fresh:
            shutil.copytree(self.checkpoint, fresh, dirs_exist_ok=True)
        return super().start(roles)


@pytest.mark.parametrize("command", ["fit", "validate", "predict"])
def test_a_checkpoint_that_is_replaced_while_it_is_read(command: str, written: Path, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    shutil.copytree(written, path)
    run = trainer(Overtaken(checkpoint=str(path)), tmp_path, steps=3, limit_val_batches=1)
    with pytest.raises(ValueError, match=rf"^checkpoint {path}: its run replaced it while .* type the copy"):
        getattr(run, command)(grpo(), datamodule=rows(num_val_rows=2), ckpt_path=path)


@pytest.fixture
def ahead(written: Path, tmp_path: Path) -> Path:
    """A checkpoint with eight prompts in flight, of partial rollouts."""
    path = tmp_path / "ahead.ckpt"
    shutil.copytree(written, path)
    return with_prompts_in_flight(path)


def with_prompts_in_flight(path: Path) -> Path:
    """The checkpoint, as partial rollouts would have written it with batches of two prompts."""
    flying = Batch.of({"prompt_ids": torch.ones(8, 1, dtype=torch.long)})
    own = {"in_flight": columns_of(flying, what="x"), "max_staleness": 2, "batch_size_in_flight": 2}
    files.write_state(path, {**files.read_state(path), **own})
    return path


class StartedAhead(OneStepOff):
    """Fails once it is to start."""

    def setup(self, trainer: pl.Trainer) -> None:
        raise RuntimeError("started")


@pytest.mark.parametrize(
    ("group_size", "max_staleness", "says"),
    [
        (2, 3, "started"),
        (2, 1, r"strategy\.max_staleness=1: .* with 2, .* 8 rows .*Type --strategy\.max_staleness 2\."),
        (4, 3, r"algo\.group_size=4: .* written with 2, .* Type --algo\.group_size 2\."),
    ],
)
def test_other_prompts_than_those_in_flight(
    ahead: Path, group_size: int, max_staleness: int, says: str, tmp_path: Path
) -> None:
    algorithm = grpo()
    algorithm.group_size = group_size
    run = trainer(StartedAhead(max_staleness=max_staleness), tmp_path, steps=3)
    with pytest.raises((ValueError, RuntimeError), match=says):
        run.fit(algorithm, datamodule=rows(), ckpt_path=ahead)


def test_prompts_in_flight_keep_the_batch_size_over_a_complete_epoch(tmp_path: Path) -> None:
    """The rows and all other options are those of now."""
    path = with_prompts_in_flight(checkpoint(tmp_path, steps=3))
    for options, says in (
        ({"batch_size": 3}, r"^data\.batch_size=3: .* with 2, .* 8 rows .*Type --data\.batch_size 2\.$"),
        ({"num_rows": 8, "shuffle": False}, "started"),
    ):
        run = trainer(StartedAhead(max_staleness=2), tmp_path, steps=5)
        with pytest.raises((ValueError, RuntimeError), match=says):
            run.fit(grpo(), datamodule=rows(**options), ckpt_path=path)


@pytest.mark.parametrize(
    ("algorithm", "begun_by"),
    [
        (grpo(), {}),
        (OnlineDPO(actor=grpo().actor), {"group_size": 2}),
        (SFT(actor=grpo().actor), {"group_size": 2}),
    ],
    ids=["begun without groups", "gone on with without groups", "answers are given"],
)
def test_prompts_in_flight_are_compared_by_options_that_both_algorithms_have(
    ahead: Path, algorithm: RLHFAlgorithm, begun_by: dict[str, int], tmp_path: Path
) -> None:
    files.write_state(ahead, {**files.read_state(ahead), "hyper_parameters": begun_by})
    strategy = StartedAhead() if algorithm.reads_only else StartedAhead(max_staleness=2)
    data = rows(completions=algorithm.reads_only)
    with pytest.raises(RuntimeError, match="started"):
        trainer(strategy, tmp_path, steps=3).fit(algorithm, datamodule=data, ckpt_path=ahead)


class Generating(StartedAhead):
    """Fails once its generator is there."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Make what generates, and refuse."""
        self.generation = generation(self)
        super().setup(trainer)


def generation(strategy: OneStepOff) -> Ahead:
    """What a run under this strategy would generate with."""
    nowhere = WorkerGroup("actor", cast(Transport, None), ParallelLayout(), (0,))
    return strategy.make_generation(nowhere, nowhere, recompute_log_probs=False)


def test_a_run_leaves_nothing_in_flight_to_the_next_one(ahead: Path, tmp_path: Path) -> None:
    for strategy in (StartedAhead(max_staleness=3), Generating(max_staleness=3)):
        with pytest.raises(RuntimeError, match="started"):
            trainer(strategy, tmp_path, steps=3).fit(grpo(), datamodule=rows(), ckpt_path=ahead)
        assert strategy.metrics() == {}
        assert generation(strategy).in_flight is None


def test_a_checkpoint_without_a_model_that_the_algorithm_trains(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    instead = r"Type a checkpoint of this algorithm, or begin with the model that `rlhf export` makes"
    with pytest.raises(
        ValueError, match=rf"holds \['actor'\], and .* keeps \['actor', 'critic'\]\. {instead}"
    ):
        resume.check_held(tmp_path, tmp_path, {"actor": Actor(), "critic": Critic()})
