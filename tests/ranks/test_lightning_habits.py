"""What users of Lightning write by habit: it works, or they are told what to write here."""

from __future__ import annotations

from dataclasses import field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelSummary,
)
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from rlhf_lightning import checkpoint as files
from rlhf_lightning.algos import GRPO
from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData, load_tokenizer
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Reward
from tests.unit.algos.short import Started, grpo, refusal, trainer


class Recorded(GRPO):
    """Saves its options by itself, which `setup` does anyway."""

    budget: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.save_hyperparameters()


def test_an_algorithm_may_save_its_hyperparameters(tmp_path: Path) -> None:
    algorithm = grpo(Recorded)
    assert algorithm.hparams["budget"] == 2.0
    assert refusal(algorithm, tmp_path) == "started"
    assert algorithm.hparams["actor"]["sampling"]["max_new_tokens"] == 2


class Constructed(GRPO):
    """Has a constructor of its own, as Lightning's documentation does."""

    def __init__(self, *, budget: float) -> None:
        super().__init__(reward=Reward(functions={"length": 1.0}))
        self.save_hyperparameters({"budget": budget})


def test_an_argument_of_a_constructor_that_is_saved_by_name(tmp_path: Path) -> None:
    algorithm = Constructed(budget=3.0)
    run = trainer(Local(), tmp_path, logger=CSVLogger(tmp_path, name="", version=""))
    run.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))
    assert (algorithm.hparams["budget"], algorithm.hparams["group_size"]) == (3.0, 8)
    assert "budget: 3.0" in (tmp_path / "hparams.yaml").read_text()


class Arrayed(GRPO):
    """Has an option that is an array."""

    bins: NDArray[np.float64] = field(default_factory=lambda: np.array([0.5, 1.0]))


def test_an_option_may_be_an_array(tmp_path: Path) -> None:
    algorithm = grpo(Arrayed)
    run = trainer(Local(), tmp_path, logger=CSVLogger(tmp_path, name="", version=""))
    run.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))
    assert run.global_step == 1
    assert algorithm.hparams["bins"] == "[0.5 1. ]"
    assert "group_size: 2" in (tmp_path / "hparams.yaml").read_text()


class Tokenized(TaskData):
    """Keeps its tokenizer as Lightning's documentation does; a checkpoint holds no such object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.save_hyperparameters({"reader": load_tokenizer("embedded")})


class Remembering(Recorded):
    """An algorithm that does so too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.save_hyperparameters({"reader": load_tokenizer("embedded")})


def test_objects_among_hyperparameters_do_not_end_a_run_as_it_saves(tmp_path: Path) -> None:
    own, data = LastCheckpoint(tmp_path), Tokenized(batch_size=2, num_rows=4, num_val_rows=0)
    run = trainer(Local(), tmp_path, enable_checkpointing=True, callbacks=[own])
    run.fit(grpo(Remembering), datamodule=data)
    state = files.read_state(own.path)
    for name in ("hyper_parameters", "datamodule_hyper_parameters"):
        kept = state[name]
        assert isinstance(kept, dict)
        assert kept["reader"] == str(load_tokenizer("embedded"))
    again = trainer(Local(), tmp_path, steps=2)
    again.fit(grpo(Remembering), datamodule=data, ckpt_path=own.path)
    assert again.global_step == 2


class Noting(GRPO):
    """Puts something of its own into checkpoints, from the second on under another name."""

    key: str = "mine"

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        checkpoint["mine" if self.global_step < 2 else self.key] = self.global_step


@pytest.mark.parametrize("key", ["models", "paths", "in_flight"])
def test_a_name_in_checkpoints_that_is_taken_is_refused_as_they_are_saved(key: str, tmp_path: Path) -> None:
    own, algorithm = LastCheckpoint(tmp_path, every_n_steps=1), grpo(Noting)
    assert isinstance(algorithm, Noting)
    algorithm.key = key
    run = trainer(Local(), tmp_path, steps=2, enable_checkpointing=True, callbacks=[own])
    said = rf"last\.ckpt: on_save_checkpoint has put something under '{key}', .* such as 'my_{key}'\."
    with pytest.raises(ValueError, match=said):
        run.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=0))
    state = files.read_state(own.path)
    assert (state["global_step"], state["mine"]) == (1, 1)


def test_batches_of_a_plain_loader_are_no_columns(tmp_path: Path) -> None:
    texts: DataLoader[str] = DataLoader(["Sort 21: ", "Sort 43: "], batch_size=2)  # type: ignore[arg-type]
    for held_out in (None, texts):
        run = trainer(Local(), tmp_path, limit_val_batches=1)
        with pytest.raises(TypeError, match=r"^a list is not a batch: .* datamodule=PromptData\(path="):
            run.fit(grpo(), texts, held_out)


class Logging(GRPO):
    """Logs by itself, as Lightning's documentation does."""

    name: str = "mine/number"

    def step(self, batch: Batch) -> Metrics:
        self.log(self.name, 7.0 + self.global_step)
        self.log("mine/mean", 1.0 + self.global_step, on_step=False, on_epoch=True)
        self.log_dict({"mine/shown": 2.0}, prog_bar=True)
        return super().step(batch)


def logging_as(name: str) -> GRPO:
    algorithm = grpo(Logging)
    assert isinstance(algorithm, Logging)
    algorithm.name = name
    return algorithm


def test_a_step_may_log_by_itself(tmp_path: Path) -> None:
    run = trainer(Local(), tmp_path, steps=2, logger=CSVLogger(tmp_path, name="", version=""))
    run.fit(logging_as("mine/number"), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=0))
    found = {name: float(value) for name, value in run.callback_metrics.items()}
    assert {found[name] for name in ("mine/number", "mine/mean", "mine/shown")} == {8.0, 1.5, 2.0}
    assert "reward/mean" in found


def test_a_script_may_fit_in_inference_mode(tmp_path: Path) -> None:
    run, data = trainer(Local(), tmp_path, limit_val_batches=1), TaskData(batch_size=2, num_rows=2)
    with torch.inference_mode():
        run.fit(grpo(), datamodule=data)
    assert run.global_step == 1


@pytest.mark.parametrize("name", ["reward/mean", "reward/std", "time/step_s"])
def test_a_name_that_the_iteration_reports_is_not_logged_twice(name: str, tmp_path: Path) -> None:
    """Lightning speaks of training_step for what the progress bar shows, and drops the first of the rest."""
    said = rf"^self\.log\('{name}', \.\.\.\): the iteration .* such as 'mine/{name.partition('/')[2]}'\.$"
    with pytest.raises(ValueError, match=said):
        trainer(Local(), tmp_path).fit(logging_as(name), datamodule=TaskData(batch_size=2, num_rows=4))


class Columned(GRPO):
    """Makes prompts of other columns."""

    def step(self, batch: Batch) -> Metrics:
        return Metrics.of({"mine/texts": float(len(batch.objects("prompt")))})


@pytest.mark.parametrize("called", ["fit", "validate", "predict"])
def test_batches_of_rows_are_no_batches_of_prompts(called: str, tmp_path: Path) -> None:
    loader: DataLoader[dict[str, str]] = DataLoader(
        [{"prompt": "Sort 21: ", "answer": "1"}] * 2,  # type: ignore[arg-type]
        batch_size=2,
    )
    said = r"^a batch has the columns \['answer', 'prompt'\], and no 'prompt_ids': .*PromptData\.from_rows\("
    run = trainer(Local(), tmp_path, limit_val_batches=1)
    with pytest.raises(ValueError, match=said):
        getattr(run, called)(grpo(), loader)
    trainer(Local(), tmp_path).fit(grpo(Columned), loader)


def test_the_same_where_a_second_batch_comes_along(tmp_path: Path) -> None:
    row: dict[str, object] = {"prompt": "Sort 21: ", "answer": "1", "ptx": {"text": "12"}}
    loader: DataLoader[dict[str, object]] = DataLoader([row] * 2, batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^a batch has the columns \['answer', 'prompt'\], and no 'prompt_ids'"
    ):
        trainer(Local(), tmp_path).fit(grpo(), loader)


def test_a_checkpoint_is_loaded_by_a_run(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"^GRPO\.load_from_checkpoint: .* trainer\.fit\(GRPO\(\.\.\.\), ckpt_path="
    ):
        GRPO.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")


class Warming(GRPO):
    """Raises the learning rate as Lightning's documentation does."""

    def optimizer_step(self, *_: object, **__: object) -> None:
        """Nothing that anybody would see."""


class Clipping(GRPO):
    """Looks at gradients as Lightning's documentation does."""

    def on_before_optimizer_step(self, *_: object) -> None:
        """Nothing that anybody would see."""


@pytest.mark.parametrize(
    ("kind", "method"), [(Warming, "optimizer_step"), (Clipping, "on_before_optimizer_step")]
)
def test_methods_that_nobody_would_call(kind: type[GRPO], method: str, tmp_path: Path) -> None:
    told = refusal(grpo(kind), tmp_path)
    assert told.startswith(
        f"{kind.__name__}.{method} is never called: each model is updated on its devices, "
    )


class GradientNorms(Callback):
    """Looks at gradients, and at metrics."""

    def on_after_backward(self, *_: object) -> None:
        """Nothing that anybody would see."""

    def on_train_batch_end(self, *_: object) -> None:
        """What is called."""


def test_a_callback_is_told_which_hooks_are_not_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = LambdaCallback(on_before_zero_grad=lambda *_: None, on_train_start=lambda *_: None)
    run = trainer(Local(), tmp_path, steps=1, callbacks=[GradientNorms(), plain, ModelSummary()])
    run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))
    told = [record.getMessage().split(":")[0] for record in caplog.records if "never" in record.getMessage()]
    assert told == [
        "GradientNorms.on_after_backward is never called",
        "LambdaCallback.on_before_zero_grad is never called",
    ]


@pytest.mark.parametrize("uploads", [True, "all"])
def test_a_logger_that_would_upload_checkpoints(tmp_path: Path, uploads: bool | Literal["all"]) -> None:
    loggers = [CSVLogger(tmp_path), WandbLogger(save_dir=tmp_path, log_model=uploads)]
    with pytest.raises(ValueError, match=rf"^WandbLogger\(log_model={uploads!r}\): checkpoints are dir"):
        trainer(Local(), tmp_path, logger=loggers).fit(grpo())
    data = TaskData(batch_size=2, num_rows=2, num_val_rows=0)
    trainer(Local(), tmp_path, logger=loggers, fast_dev_run=True).fit(grpo(), datamodule=data)  # logs nothing


def test_the_table_of_an_earlier_run_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """Also by a run that is refused later, for which Lightning would have deleted it."""
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=2)
    first, second = (CSVLogger(tmp_path, name="", version="mine") for _ in range(2))
    run = trainer(Local(), tmp_path, steps=2, logger=first, log_every_n_steps=1, limit_val_batches=1)
    run.fit(grpo(), datamodule=data)
    run.validate(grpo(), datamodule=data, verbose=False)
    table = tmp_path / "mine" / "metrics.csv"
    written = table.read_text()
    assert not [*table.parent.glob("metrics-*")], "a later run of the same logger adds to its table"
    with pytest.raises(RuntimeError, match="started"):
        trainer(Started(), tmp_path, logger=second).fit(grpo(), datamodule=data)
    assert (table.parent / "metrics-v1.csv").read_text() == written
    assert f"{table} is of an earlier run; it is metrics-v1.csv now." in caplog.text
    assert not [warning for warning in recwarn if "will be deleted" in str(warning.message)]


@pytest.mark.parametrize(
    ("called", "interval"),
    [("fit", "00:00:30:00"), ("validate", timedelta(minutes=30)), ("predict", {"minutes": 30})],
)
def test_an_interval_of_validations_may_be_a_time(called: str, interval: object, tmp_path: Path) -> None:
    stop = EarlyStopping("val/reward")
    run = trainer(Local(), tmp_path, limit_val_batches=1, val_check_interval=interval, callbacks=[stop])
    getattr(run, called)(grpo(), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=2))
    assert run.state.finished


def bringing(callback: Callback) -> type[GRPO]:
    """An algorithm with a callback of its own, as Lightning's documentation has it."""

    class Bringing(GRPO):
        def configure_callbacks(self) -> Callback:
            return callback

    return Bringing


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (EMAWeightAveraging(), "weights and gradients are on the devices"),
        (LearningRateFinder(), "its trials train the models"),
        (ModelCheckpoint(train_time_interval=timedelta(minutes=1)), "Lightning would never save"),
        (ModelCheckpoint(save_on_exception=True), "an error comes in the middle of an iteration"),
    ],
    ids=["averages", "trials", "clock", "exception"],
)
def test_callbacks_that_an_algorithm_brings_are_refused_too(
    callback: Callback, said: str, tmp_path: Path
) -> None:
    assert said in refusal(grpo(bringing(callback)), tmp_path)


def test_callbacks_that_an_algorithm_brings_look_after_every_validation_too(tmp_path: Path) -> None:
    stop = EarlyStopping("val/reward")
    run = trainer(Local(), tmp_path, limit_val_batches=1, val_check_interval=1)
    run.fit(grpo(bringing(stop)), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=2))
    assert stop._check_on_train_epoch_end is False
