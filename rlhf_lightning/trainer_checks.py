"""Checks of what is asked of Lightning: options and callbacks of its trainer, and hooks of an algorithm."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import Precision, TorchCheckpointIO

from rlhf_lightning.output import check_output, checkpoint_directories, keepers
from rlhf_lightning.stores import check_local
from rlhf_lightning.trainer_habits import validation_interval

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from rlhf_lightning.algorithm import RLHFAlgorithm
    from rlhf_lightning.engines import TrainConfig
    from rlhf_lightning.strategy import Strategy

logger = logging.getLogger(__name__)

_FINAL = {
    "training_step": "Write step(self, batch): it is called once an iteration.",
    "configure_optimizers": "Each model has an AdamW of its own, with options such as actor.optimizer.lr.",
}
"""Lightning's methods that a subclass must not override, and what to write instead."""
_UNCALLED_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
"""Hooks of modules and callbacks around updates, which Lightning does not make."""
_UNCALLED = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "configure_gradient_clipping",
    *_UNCALLED_HOOKS,
)
"""Methods of modules that have no effect for the same reason."""
_WITHOUT_EFFECT: Mapping[type[Callback], str] = {
    WeightAveraging: "it averages the controller's module. Try --algo.reference.decay",
    StochasticWeightAveraging: "it averages the controller's module. Try --algo.reference.decay",
    ModelPruning: "it prunes the controller's module. Prune the model that `rlhf export` writes",
    BaseFinetuning: "it freezes parts of the controller's module. Try --algo.actor.lora.rank, for adapters",
    GradientAccumulationScheduler: "an update is over a whole mini-batch. Try --algo.mini_batch_size",
    SpikeDetection: "its loss is that of training_step, which returns none. Watch actor/grad_norm and "
    "<role>/skipped_steps",
}
"""Callbacks that work on a module with weights or a loss, why they could not, and what to do instead."""


def check_lightning(algorithm: RLHFAlgorithm) -> None:
    """Refuse Lightning's own strategies, which place no models, and overriding what runs an algorithm."""
    strategy = algorithm.trainer.strategy
    if not hasattr(strategy, "settings"):
        raise ValueError(
            f"{type(algorithm).__name__}: its models are placed by a strategy of rlhf_lightning.strategies, "
            f"and the trainer has {type(strategy).__name__}. Type Trainer(strategy=Colocated(), ...), or "
            "Local() for one process without Ray."
        )
    _check_methods(algorithm)


def check_trainer(trainer: Trainer, strategy: Strategy) -> None:
    """Refuse trainer options that the strategy or the models decide: they would have no effect."""
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
    if connector._layer_sync is not None:
        raise ValueError("Trainer(sync_batchnorm=True): the strategy divides the models. Leave it out.")
    if trainer._detect_anomaly and not strategy.in_process:
        raise ValueError(
            "Trainer(detect_anomaly=True): it watches this process, and gradients are computed on devices. "
            "Type --strategy local, in Python Trainer(strategy=Local()), which computes here."
        )
    kind = type(strategy.algorithm)
    if trainer.state.fn == "test" and kind.test_step is LightningModule.test_step:
        raise ValueError(
            f"trainer.test: {kind.__name__} has no test_step. Type trainer.validate, which answers "
            "and scores held-out prompts, or write one."
        )
    plugin = connector.checkpoint_io
    if not isinstance(plugin, TorchCheckpointIO | None):  # Lightning's own comes with a used strategy
        raise ValueError(
            f"Trainer(plugins={type(plugin).__name__}()): it would write nothing, since each device writes "
            "its share of a checkpoint itself. Leave it out."
        )
    check_local(trainer.default_root_dir, option="trainer.default_root_dir")
    _check_intervals(trainer)
    _check_loggers(trainer)
    _check_gradients(trainer, strategy.settings.training)


def check_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that cannot work on remote models, or would save a state that no run can resume.

    Warns of a callback's hooks that are never called.

    Args:
        trainer: of the run; Lightning adds to its callbacks those that the algorithm's `configure_callbacks`
            returns, after it has connected the strategy.

    Raises:
        ValueError: there is such a callback, or the directory of one's checkpoints takes no files.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        name = type(callback).__name__
        _check_hooks(callback)
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
                "--trainer.callbacks+=LastCheckpoint --trainer.callbacks.directory DIRECTORY "
                "--trainer.callbacks.every_n_steps 1 keeps the iteration before."
            )
    _check_checkpoints(trainer)


def _check_methods(algorithm: RLHFAlgorithm) -> None:
    kind = type(algorithm)
    for name, instead in _FINAL.items():
        if not getattr(getattr(kind, name), "__final__", False):
            raise ValueError(f"{kind.__name__}.{name} replaces what runs an algorithm. {instead}")
    for name in _UNCALLED:
        if getattr(kind, name) is not getattr(LightningModule, name):
            raise ValueError(
                f"{kind.__name__}.{name} is never called: each model is updated on its devices, as its "
                "options say. Leave it out; `rlhf fit --algo.actor.help` lists them (optimizer.warmup_steps)."
            )
    if algorithm.trainer.state.fn == "fit" and getattr(kind.step, "__isabstractmethod__", False):
        raise ValueError(
            f"{kind.__name__} has no step, so nothing would be learned. Write `def step(self, batch: Batch) "
            "-> Metrics` in the class, or extend an algorithm that has one, such as PPO."
        )


def _check_intervals(trainer: Trainer) -> None:
    """Refuse a validation interval of 0, by which Lightning would divide."""
    intervals = {
        "val_check_interval": validation_interval(trainer),
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
    }
    for name, interval in intervals.items():
        if interval == 0:
            raise ValueError(f"Trainer({name}=0): type 1 or more, or limit_val_batches=0 for no validation.")


def _check_loggers(trainer: Trainer) -> None:
    """Refuse loggers that are to upload checkpoints: they would pass over each, since it is no file."""
    for logger in trainer.loggers:
        uploads = getattr(logger, "_log_model", False)
        if uploads in (True, "all"):  # the logger of a fast_dev_run has every attribute
            raise ValueError(
                f"{type(logger).__name__}(log_model={uploads!r}): checkpoints are directories, which it does "
                "not upload. Leave log_model out; `rlhf export` writes the model, for an upload of your own."
            )


def _check_hooks(callback: Callback) -> None:
    """Refuse callbacks whose work would be lost, and warn of hooks that are never called."""
    name = type(callback).__name__
    for kind, why in _WITHOUT_EFFECT.items():
        if isinstance(callback, kind):
            raise ValueError(f"{name}: weights and gradients are on the devices; {why}.")
    for hook in _UNCALLED_HOOKS:
        if getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook):
            logger.warning(
                "%s.%s is never called: models are updated on their devices. on_train_batch_end follows each "
                "iteration, and norms of gradients are metrics (actor/grad_norm).",
                name,
                hook,
            )


def _check_checkpoints(trainer: Trainer) -> None:
    """Refuse a run whose checkpoints could not be written."""
    for keeper in keepers(trainer):
        check_local(keeper.dirpath, option=f"{type(keeper).__name__}.dirpath")
    for directory, name in checkpoint_directories(trainer).items():
        check_output(trainer, directory, name=name)


def _check_gradients(trainer: Trainer, training: TrainConfig) -> None:
    """Refuse gradient options of the trainer: the models' own optimizers clip and accumulate gradients."""
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
