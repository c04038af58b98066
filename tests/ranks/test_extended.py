"""A run that goes on from a checkpoint ends like one that was never stopped, bit for bit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from rlhf_lightning import checkpoint as files
from rlhf_lightning.algos import GRPO
from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines.checkpoint import CheckpointReader
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward
from tests.ray.model import write_tiny
from tests.unit.algos.short import trainer

Options = dict[str, int]
Saving = Callable[[Path], ModelCheckpoint]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory)
    return directory


class Steps(EarlyStopping):
    """Notes the number of each iteration in the logs and its rows, and the validations, without rows.

    And what an early stop that looks at the ends of epochs has seen, in runs of whole epochs.
    """

    def __init__(self, monitor: str, *, looks: bool) -> None:
        super().__init__(monitor, patience=99, mode="max", strict=looks)
        self.seen: list[tuple[int, list[int]]] = []
        self.looks = looks

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: dict[str, torch.Tensor],
        batch_idx: int,
    ) -> None:
        logged = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.seen.append((logged, batch["row_ids"].tolist()))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note after which iteration there was one."""
        super().on_validation_end(trainer, pl_module)
        self.seen.append((trainer.global_step, []))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note after which iteration, and how many it has looked at that were no better."""
        super().on_train_epoch_end(trainer, pl_module)
        if self.looks:
            self.seen.append((trainer.global_step, [-1, self.wait_count]))


def fit(model: Path, saving: ModelCheckpoint, options: Options, **until: int) -> list[tuple[int, list[int]]]:
    """Train up to an iteration or epoch, from the last checkpoint where there is one."""
    settings: dict[str, Any] = {"limit_val_batches": 0, "max_steps": -1, **options, **until}
    rows, validates = settings.pop("rows"), settings["limit_val_batches"]
    noting = Steps("val/reward" if validates else "reward/mean", looks="max_epochs" in until)
    trainer = Trainer(
        strategy=Local(),
        accelerator="cpu",
        logger=False,
        callbacks=[noting, saving],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    actor = Actor(path=str(model), sampling=Sampling(max_new_tokens=4))
    algorithm = GRPO(actor=actor, reward=Reward(functions={"length": 1.0}), group_size=2)
    data = TaskData(num_rows=rows, num_val_rows=2, batch_size=2)
    found = saving._find_last_checkpoints(trainer)
    trainer.fit(algorithm, datamodule=data, ckpt_path="last" if found else None, weights_only=False)
    return noting.seen


def ours(directory: Path) -> ModelCheckpoint:
    return LastCheckpoint(directory)


def after_epochs(directory: Path) -> ModelCheckpoint:
    return ModelCheckpoint(directory, "last", save_on_train_epoch_end=True, enable_version_counter=False)


def after_steps(directory: Path) -> ModelCheckpoint:
    return ModelCheckpoint(directory, "last", every_n_train_steps=1, enable_version_counter=False)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    every = (load_file(path) for path in sorted((directory / "last.ckpt" / "actor").glob("*.safetensors")))
    return {name: tensor for part in every for name, tensor in part.items()}


def counts(directory: Path) -> object:
    """What the fit loop and the sampler count."""
    state = files.read_state(files.find(directory / "last.ckpt"))
    loops = cast(dict[str, dict[str, Any]], state["loops"])["fit_loop"]
    (loader,) = loops["state_dict"]["combined_loader"]
    sampler = loader["_sampler_iter_state"]["sampler_state"]
    names = ("epoch_loop.state_dict", "epoch_loop.batch_progress")
    progress = {name: loops[name] for name in names}
    return progress, loops["epoch_progress"]["total"], sampler


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("saving", "stops", "options"),
    [
        pytest.param(ours, (2, 4), {"rows": 32}, id="in an epoch"),
        pytest.param(after_epochs, (2, 4), {"rows": 32}, id="in an epoch, by another callback"),
        pytest.param(after_steps, (2, 4), {"rows": 32}, id="in an epoch, saved before its end"),
        pytest.param(ours, (1, 2, 3), {"rows": 32}, id="twice in an epoch"),
        pytest.param(ours, (6, 9), {"rows": 8}, id="in the second epoch"),
        pytest.param(ours, (4, 6, 7), {"rows": 8}, id="after an epoch"),
        pytest.param(after_steps, (4, 6, 7), {"rows": 8}, id="after an epoch, saved before its end"),
        pytest.param(after_epochs, (4, 6, 7), {"rows": 8}, id="after an epoch, by another callback"),
        pytest.param(ours, (2, 5), {"rows": 32, "limit_train_batches": 3}, id="in a shortened epoch"),
        pytest.param(ours, (3, 5), {"rows": 32, "limit_train_batches": 3}, id="after a shortened epoch"),
        pytest.param(
            ours,
            (2, 5),
            {"rows": 8, "limit_val_batches": 1, "val_check_interval": 2},
            id="after a validation",
        ),
        pytest.param(
            ours, (4, 6, 7), {"rows": 8, "limit_val_batches": 1}, id="after an epoch and a validation"
        ),
    ],
)
def test_a_run_that_is_extended(
    saving: Saving, stops: tuple[int, ...], options: Options, tiny: Path, tmp_path: Path
) -> None:
    check(tiny, tmp_path, saving, [{"max_steps": steps} for steps in stops], options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [10, 2])
@pytest.mark.parametrize("limit_val_batches", [0, 1])
def test_a_run_that_is_extended_by_an_epoch(
    limit_val_batches: int, every: int, tiny: Path, tmp_path: Path
) -> None:
    def saving(directory: Path) -> ModelCheckpoint:
        return LastCheckpoint(directory, every_n_steps=every)

    stops = [{"max_epochs": 1}, {"max_epochs": 1}, {"max_epochs": 2}]
    check(tiny, tmp_path, saving, stops, {"rows": 8, "limit_val_batches": limit_val_batches})


def check(model: Path, root: Path, saving: Saving, stops: Sequence[dict[str, int]], options: Options) -> None:
    """Stopped and extended it has the same rows, counts and weights as uninterrupted."""
    whole = fit(model, saving(root / "whole"), options, **stops[-1])
    parts = [step for until in stops for step in fit(model, saving(root / "part"), options, **until)]
    assert parts == whole
    assert counts(root / "part") == counts(root / "whole")
    first, second = tensors(root / "whole"), tensors(root / "part")
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def saved(model: Path, root: Path) -> Path:
    """A checkpoint of GRPO, which has no tensors of its own."""
    fit(model, ours(root), {"rows": 8}, max_steps=1)
    return root / "last.ckpt"


class Counting(GRPO):
    """Has a tensor of its own."""

    size: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.register_buffer("counts", torch.zeros(self.size))


def run(algorithm: GRPO, checkpoint: Path, *, command: str) -> None:
    """`fit` or `validate` from a checkpoint."""
    data = TaskData(num_rows=8, num_val_rows=2, batch_size=2)
    getattr(trainer(Local(), checkpoint.parent, limit_val_batches=1), command)(
        algorithm, datamodule=data, ckpt_path=checkpoint, weights_only=False
    )


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_another_algorithm(tiny: Path, tmp_path: Path) -> None:
    checkpoint = saved(tiny, tmp_path)

    def counting(size: int = 2) -> Counting:
        actor = Actor(path=str(tiny), sampling=Sampling(max_new_tokens=4))
        return Counting(actor=actor, reward=Reward(functions={"length": 1.0}), group_size=2, size=size)

    said = r"last\.ckpt: is of another algorithm.* holds nothing, and Counting has counts \[2\]\."
    with pytest.raises(ValueError, match=said):
        run(counting(), checkpoint, command="fit")
    run(counting(), checkpoint, command="validate")
    state = files.read_state(checkpoint) | {"state_dict": {"counts": torch.ones(3)}}
    files.write_state(checkpoint, state)
    with pytest.raises(ValueError, match=r"holds counts \[3\], and Counting has counts \[2\]\."):
        run(counting(), checkpoint, command="fit")
    run(counting(), checkpoint, command="validate")
    fits = counting(size=3)
    run(fits, checkpoint, command="validate")
    assert fits.state_dict()["counts"].tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore")
def test_what_evaluates_reads_no_moments(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved(tiny, tmp_path)
    read: list[str] = []

    def noted(_: CheckpointReader, tensors: dict[str, torch.Tensor], **_rest: object) -> None:
        read.extend(tensors)

    monkeypatch.setattr(CheckpointReader, "fill", noted)
    actor = Actor(path=str(tiny), sampling=Sampling(max_new_tokens=4))
    algorithm = GRPO(actor=actor, reward=Reward(functions={"length": 1.0}), group_size=2)
    run(algorithm, checkpoint, command="validate")
    assert {name.partition(".")[0] for name in read} == {"model"}


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writes", ["the engine", "the trainer"])
def test_a_full_disk_leaves_the_checkpoint_before(
    writes: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved(tiny, tmp_path)
    if writes == "the engine":
        monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", full)
    else:
        monkeypatch.setattr(files, "write_state", full)
    with pytest.raises(OSError, match="No space left on device; the checkpoint before it") as caught:
        fit(tiny, ours(tmp_path), {"rows": 8}, max_steps=2)
    assert caught.value.filename == str(checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert files.read_state(checkpoint)["global_step"] == 1
