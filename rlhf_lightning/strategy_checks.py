"""Checks of a strategy and its trainer before any worker starts, and of runs that would lose their result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn

from rlhf_lightning.data import MixedData, RowData, row_data
from rlhf_lightning.field_types import check_types
from rlhf_lightning.output import check_output
from rlhf_lightning.usage import naming_role

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from rlhf_lightning.algorithm import RLHFAlgorithm
    from rlhf_lightning.controller.cluster import ResourcePool
    from rlhf_lightning.engines import TrainConfig
    from rlhf_lightning.strategy import Strategy
    from rlhf_lightning.workers import Role

_READ: Mapping[TrainerFn | None, Sequence[str]] = {
    TrainerFn.FITTING: ("train", "val"),
    TrainerFn.VALIDATING: ("val",),
    TrainerFn.PREDICTING: ("predict",),
}
"""The loaders that a trainer's method reads."""


def check_options(strategy: Strategy) -> None:
    """Refuse values of wrong types, no devices or time, and offloading while vLLM is told to keep its memory.

    Raises:
        ValueError: a field is of the wrong type, `devices` or `timeout_s` is too small, or `offload`
            contradicts `vllm.sleep`.
    """
    check_types(strategy, name="strategy")
    if strategy.devices is not None and strategy.devices < 1:
        raise ValueError(f"strategy.devices={strategy.devices}: a job needs at least 1 device.")
    if strategy.timeout_s <= 0:
        raise ValueError(f"strategy.timeout_s={strategy.timeout_s}: must be above 0. Try 1800.")
    settings = strategy.settings
    if strategy.offload and settings.generator == "vllm" and not settings.vllm.sleep:
        raise ValueError(
            "strategy.settings.vllm.sleep=false with strategy.offload=true: vLLM is to keep its memory, and "
            "to make room for other models. Leave one of them out."
        )


def check_trainer(trainer: Trainer, strategy: Strategy) -> None:
    """Refuse trainer options that the strategy or the models decide: they would have no effect.

    Raises:
        ValueError: an option of the trainer would have no effect, or could not work with remote models.
    """
    connector = trainer._accelerator_connector
    flag = connector._devices_flag
    devices = flag if isinstance(flag, int) else len(flag)
    if devices not in (1, connector.accelerator.auto_device_count(), strategy.devices):
        takes = "devices" in inspect.signature(type(strategy)).parameters
        name = type(strategy).__name__ if takes else "Colocated"
        raise ValueError(
            f"Trainer(devices={devices}): the strategy divides the devices. Type "
            f"Trainer(strategy={name}(devices={devices})) instead."
        )
    if (nodes := connector._num_nodes_flag) != 1:
        raise ValueError(
            f"Trainer(num_nodes={nodes}): the nodes are those of the Ray cluster. Leave num_nodes out, and "
            'type Trainer(strategy=Colocated(address="HOST:PORT")) for a cluster that runs.'
        )
    if type(trainer.precision_plugin) is not Precision:
        raise ValueError(
            f"Trainer(precision={trainer.precision!r}): each model has a type of its own. Type "
            'Actor(dtype="bfloat16") instead, and so for models of other paths than the actor\'s.'
        )
    _check_intervals(trainer)
    _check_callbacks(trainer)
    _check_checkpoints(trainer)
    _check_gradients(trainer, strategy.settings.training)


def check_layouts(strategy: Strategy, roles: Mapping[str, Role], pools: Sequence[ResourcePool]) -> None:
    """Refuse models that their devices cannot be divided among.

    Raises:
        ValueError: a model does not divide so, or its engine cannot train it so.
    """
    for pool in pools:
        for name in pool.roles:
            layout = strategy.layout(roles[name], name, pool.num_devices)
            if roles[name].path:
                with naming_role(name):
                    roles[name].check_layout(layout, strategy.settings)


def check_start(algorithm: RLHFAlgorithm) -> None:
    """Refuse models that a first run has trained, incomplete ones, and limits that do not fit the data.

    Raises:
        ValueError: the algorithm was trained here before, or a `setup` of its own has not completed it; or
            an epoch has fewer iterations than lie between two validations, or a share of one is no batch.
    """
    _check_restart(algorithm)
    _check_set_up(algorithm)
    _check_shares(algorithm.trainer)
    _check_reached(algorithm.trainer)


def _check_restart(algorithm: RLHFAlgorithm) -> None:
    """Refuse a second run without a checkpoint: the models that the first one trained ended with it.

    Raises:
        ValueError: the algorithm was trained in this process before, and no checkpoint is given.
    """
    trainer, name, done = algorithm.trainer, type(algorithm).__name__, algorithm.iterations_here
    called = trainer.state.fn.value if trainer.state.fn else "fit"
    if done and not trainer.ckpt_path:
        raise ValueError(
            f"{name} was trained for {done} iterations in this process. Its models ended with that run's "
            f"devices, and would be those of their paths again. {_how_to_continue(trainer, called)}, or "
            f"give a new {name}(...)."
        )


def _check_set_up(algorithm: RLHFAlgorithm) -> None:
    """Refuse models that `RLHFAlgorithm.setup` has not completed: their seeds and paths would be wrong.

    Raises:
        ValueError: a subclass has a `setup` that does not call it.
    """
    if algorithm.main_model.init_seed is None:
        raise ValueError(
            f"{type(algorithm).__name__}.setup leaves out what completes and checks the models. Begin it "
            "with super().setup(stage)."
        )


def _how_to_continue(trainer: Trainer, called: str) -> str:
    """What to type to continue from a checkpoint that the trainer's callbacks have kept."""
    keepers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    if any(keeper._find_last_checkpoints(trainer) for keeper in keepers):
        return f'Go on from the last checkpoint: trainer.{called}(..., ckpt_path="last")'
    if best := [keeper.best_model_path for keeper in keepers if keeper.best_model_path]:
        return f'Go on from a checkpoint: trainer.{called}(..., ckpt_path="{best[-1]}")'
    return 'No checkpoint was kept: train with Trainer(callbacks=[LastCheckpoint("checkpoints")])'


def _check_intervals(trainer: Trainer) -> None:
    """Refuse a validation interval of 0, by which Lightning would divide.

    Raises:
        ValueError: an interval is 0.
    """
    for name in ("val_check_interval", "check_val_every_n_epoch"):
        if getattr(trainer, name) == 0:
            raise ValueError(f"Trainer({name}=0): type 1 or more, or limit_val_batches=0 for no validation.")


def _check_shares(trainer: Trainer) -> None:
    """Refuse a share of less than one batch: Lightning would, with all models loaded.

    Raises:
        ValueError: there is such a share.
    """
    if (data := row_data(trainer)) is None:
        return
    for name in _READ.get(trainer.state.fn, ()):
        limit = getattr(trainer, option := f"limit_{name}_batches")
        share = isinstance(limit, float) and limit < 1
        for batches in _batches(data, name) if share else ():
            if 0 < limit * batches < 1:
                raise ValueError(
                    f"Trainer({option}={limit}): a share of {limit} of {batches} is less than a batch. Type "
                    f"--trainer.{option} 1 for one batch, or {1 / batches:.3g} or more."
                )


def _batches(data: RowData | MixedData, name: str) -> list[int]:
    """The batches of each loader of this name."""
    if name == "train":
        loaders: Sequence[object] = [data.train_dataloader()]
    else:
        loaders = data.val_dataloader() if name == "val" else [data.predict_dataloader()]
    return [size for loader in loaders if (size := sized_len(loader)) is not None]


def _check_reached(trainer: Trainer) -> None:
    """Refuse an interval of more iterations than an epoch has: Lightning would, with all models loaded.

    Raises:
        ValueError: there is such an interval, and it is counted anew in each epoch.
    """
    data, interval, limit = row_data(trainer), trainer.val_check_interval, trainer.limit_train_batches
    validates = trainer.limit_val_batches and trainer.check_val_every_n_epoch
    if data is None or trainer.state.fn != "fit" or not validates or not isinstance(interval, int):
        return
    if (whole := sized_len(data.train_dataloader())) is None:
        return
    batches = min(whole, limit) if isinstance(limit, int) else int(whole * limit)
    if 0 < batches < interval:
        raise ValueError(
            f"Trainer(val_check_interval={interval}): an epoch has {batches} iterations, so that it is "
            "never reached. Add --trainer.check_val_every_n_epoch null, which counts on from epoch to epoch, "
            f"or type {batches} or less."
        )


def _check_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that cannot work on remote models, or would save a state that no run can resume.

    Raises:
        ValueError: there is such a callback.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ValueError(
                f"{name}: it averages the controller's module, and the weights are on the devices. Leave it "
                "out; --algo.reference.decay averages the reference."
            )
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            callbacks.remove(callback)  # a tuner adds it to the trainer, where it would stay after this error
            raise ValueError(
                f"{name}: its trials train the models, and leave them so. Leave it out; type "
                "--data.batch_size ROWS and --algo.actor.optimizer.lr RATE."
            )
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            raise ValueError(
                f"{name}(train_time_interval=...): Lightning would never save, since the models step by "
                "themselves. Type every_n_train_steps=N, in iterations."
            )
        on_exception = isinstance(callback, ModelCheckpoint) and callback.save_on_exception
        if on_exception or isinstance(callback, OnExceptionCheckpoint):
            callbacks.remove(callback)  # else it would save at this error, and its own error be shown
            raise ValueError(
                f"{name}{'(save_on_exception=True)' * on_exception}: an error comes in the middle of an "
                "iteration, of whose updates a part is done: no state to go on from. Leave it out; "
                "--trainer.callbacks+=LastCheckpoint with every_n_steps 1 keeps the iteration before."
            )


def _check_checkpoints(trainer: Trainer) -> None:
    """Refuse a run whose checkpoints could not be written.

    Raises:
        ValueError: the directory of one takes no files.
    """
    for keeper in trainer.checkpoint_callbacks if trainer.state.fn == "fit" else ():
        if isinstance(keeper, ModelCheckpoint) and keeper.dirpath:
            check_output(trainer, Path(keeper.dirpath), name=type(keeper).__name__)


def _check_gradients(trainer: Trainer, training: TrainConfig) -> None:
    """Refuse gradient options of the trainer: the models' own optimizers clip and accumulate gradients.

    Raises:
        ValueError: the trainer is to clip or to accumulate gradients.
    """
    if clip := trainer.gradient_clip_val:
        raise ValueError(
            f"Trainer(gradient_clip_val={clip}): each model has an optimizer of its own, which clips. Type "
            f"--algo.actor.optimizer.grad_clip {clip}, in Python "
            f"Actor(optimizer=OptimizerSpec(grad_clip={clip}))."
        )
    if (count := trainer.accumulate_grad_batches) != 1:
        field = training.option.rpartition(".")[2]
        raise ValueError(
            f"Trainer(accumulate_grad_batches={count}): an optimizer step is over a whole mini-batch, which "
            "is computed in micro-batches of as many tokens as fit. Type --algo.mini_batch_size ROWS, and "
            f"--{training.option}.max_tokens_per_micro_batch TOKENS, in Python "
            f"Settings({field}={type(training).__name__}(max_tokens_per_micro_batch=TOKENS))."
        )
