"""Checks and corrections of a checkpoint's state before a run continues from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch import Tensor, nn

from rlhf_lightning.checkpoint_source import CheckpointSource
from rlhf_lightning.data import row_data, second_data
from rlhf_lightning.workers import Role

logger = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]


def recount_epochs(state: Mapping[str, object]) -> None:
    """Correct the counts in a checkpoint from the end of an epoch or fit: as if saved an iteration earlier.

    Lightning counts an epoch as finished where `max_steps` or an early stop ends the fit within it: a resumed
    run would skip the rest of its rows. After a complete epoch, the next would have a single iteration, or,
    where it is longer, only those that it has more.

    Args:
        state: the checkpoint's state; the counts of its fit loop are changed in place.
    """
    loops = cast("Mapping[str, Mapping[str, Any]]", state.get("loops", {}))
    if "fit_loop" not in loops:
        return
    fit = loops["fit_loop"]
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    whole, processed = batches["is_last_batch"], epochs["total"]["processed"]
    # Saved by the validation after an epoch's last iteration: the hooks at the epoch's end have not run yet.
    hooks_left = whole and processed < epochs["total"]["ready"]
    iterating = batches["total"]["completed"] < batches["total"]["processed"] or hooks_left
    if not (whole if iterating else processed >= epochs["total"]["ready"] > 0):
        return
    left = int(not whole)
    ended = processed + iterating - left
    for name in ("total", "current"):
        epochs[name] = {"ready": ended + 1, "started": ended + left, "processed": ended, "completed": ended}
        batches[name]["completed"] = batches[name]["processed"] - 1
    if whole:
        batches["current"]["completed"] = math.inf  # the next begins at 0, however many batches it has
    batches["is_last_batch"] = False
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= not iterating


def end_if_done(trainer: Trainer) -> None:
    """End a fit of which nothing is left before it starts devices: by its limits, or as its checkpoint says.

    Raises:
        MisconfigurationException: the checkpoint is of a later epoch than the last.
    """
    if trainer.state.fn == "fit":
        trainer._checkpoint_connector.restore_loops()
        if trainer.limit_train_batches == 0:
            logger.warning("limit_train_batches=0: nothing is learned. Type 1 or more, or leave it out.")
        if trainer.fit_loop.skip:  # it says why in all other cases
            raise _TunerExitException  # by which Lightning ends a fit as one that has succeeded


def check_held(path: str | Path, directory: Path, wanted: Mapping[str, Role]) -> None:
    """Refuse a checkpoint that lacks one of the models whose weights the algorithm keeps, or has another."""
    if not all((directory / name).is_dir() for name in wanted):
        held = sorted(p.name for p in directory.iterdir() if p.is_dir())
        raise ValueError(
            f"checkpoint {path}: holds {held}, and the algorithm keeps {list(wanted)}. Type a checkpoint of "
            "this algorithm, or begin with the model that `rlhf export` makes of this one."
        )
    for name, role in wanted.items():
        role.check_checkpoint(directory / name)


def warn_of_others(path: str | Path, held: object, wanted: Collection[str]) -> None:
    """Warn of models in a checkpoint, by role, that this run has no use for: their state is lost."""
    if others := sorted(set(held if isinstance(held, dict) else ()) - set(wanted)):
        logger.warning(
            "checkpoint %s: holds %s too, which this algorithm does not keep: their weights are lost. A "
            "reference that followed the actor continues if it has its `decay` again.",
            path,
            ", ".join(others),
        )


def warn_of_paths(path: str | Path, held: object, roles: Mapping[str, Role], *, resuming: bool) -> None:
    """Warn of roles whose model began from another directory than now: adapters and references depend on it.

    Args:
        path: of the checkpoint.
        held: directories of the models by role, as the checkpoint has them.
        roles: of this run.
        resuming: whether a fit goes on; else another judge, say, is as good, and only adapters depend on it.
    """
    adapted = {name: role for name, role in kept(roles).items() if role.lora is not None}
    own = start_paths(roles if resuming else adapted)
    for role, was in held.items() if isinstance(held, dict) else ():
        if own.get(role, was) != was:
            logger.warning(
                "checkpoint %s: its %s began with %s, and this run's with %s. Unless that is the same model "
                "in another place, type --algo.%s.path %s.",
                *(path, role, was, own[role], role, was),
            )


def warn_of_rows(columns: Mapping[str, Tensor | list[object]]) -> None:
    """Warn of answers that were under way, which this strategy does not continue."""
    if columns:
        logger.warning(
            "%d answers were under way when the checkpoint was made, under a strategy that generates ahead; "
            "this one leaves their prompts out. They come again in the next epoch.",
            len(next(iter(columns.values()))),
        )


def load(source: CheckpointSource, roles: Mapping[str, Role], *, trained: bool) -> None:
    """Let the roles of a run load what a checkpoint holds of them, and wait for all.

    Args:
        source: the checkpoint.
        roles: the handles.
        trained: whether training goes on, which needs the optimizers too.

    Raises:
        ValueError: the run that wrote it has replaced it since.
    """
    directory = source.directory
    loading = [role.load(directory=directory / name, trained=trained) for name, role in kept(roles).items()]
    for ranks in loading:
        ranks.fetch()
    source.check()


def check_rows(state: Mapping[str, object], trainer: Trainer) -> None:
    """Refuse other rows than those of the epoch that is to go on, as their loader does once it starts.

    After a complete epoch the next begins with the rows and options of now, also where the loader is the
    user's own, whose state would say that all is taken. Only the second module of MixedData, which does not
    know the epochs, goes on in its rows.

    Args:
        state: of a checkpoint, after `recount_epochs`; what a complete epoch's loaders held is left out.
        trainer: whose data is set up.

    Raises:
        ValueError: the data differs in an option that decides which rows are left.
    """
    loops = cast("Mapping[str, Mapping[str, Any]]", state.get("loops", {}))
    fit = loops.get("fit_loop", {})
    begun = fit.get("state_dict", {}).get("combined_loader", [])
    if not begun or trainer.limit_train_batches == 0:
        return
    epochs = fit["epoch_progress"]["total"]
    if epochs["started"] < epochs["ready"]:
        second = second_data(trainer) is not None and "ptx" in begun[0]
        begun = fit["state_dict"]["combined_loader"] = [{"ptx": begun[0]["ptx"]}] if second else []
    if begun and row_data(trainer) is not None:
        trainer.datamodule.train_dataloader().load_state_dict(begun[0])  # type: ignore[attr-defined]


def check_tensors(held: Tensors, own: Tensors, *, source: CheckpointSource | None, name: str) -> None:
    """Refuse the tensors of another algorithm.

    Args:
        held: the algorithm's own tensors in the checkpoint.
        own: the tensors of the algorithm that is to continue.
        source: the checkpoint, for the message.
        name: the algorithm's, for the message.
    """
    there, here = _described(held), _described(own)
    if there != here:
        raise ValueError(
            f"checkpoint {source}: is of another algorithm, or of one with other options: beside its models "
            f"it holds {', '.join(there) or 'nothing'}, and {name} has {', '.join(here) or 'nothing'}. Type "
            "a checkpoint of this algorithm, or begin with the model that `rlhf export` makes of this one."
        )


def fitting(held: Tensors, own: Tensors) -> dict[str, Tensor]:
    """The algorithm's tensors, as in the checkpoint where that holds them in the same shape."""
    return {n: held[n] if n in held and held[n].shape == own[n].shape else own[n] for n in own}


def begun(algorithm: nn.Module, first: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Let a run begin from the options, whatever a trial run or one that failed has left in the algorithm.

    A checkpoint's tensors are loaded later.

    Args:
        algorithm: its own tensors are set, but for those of which `first` has none of the same shape.
        first: what they were before the first run; None if this is the first.

    Returns:
        `first`, for the next run.
    """
    own = algorithm.state_dict()
    if first is None:
        return {name: tensor.clone() for name, tensor in own.items()}
    algorithm.load_state_dict(fitting(first, own))
    return first


def _described(tensors: Tensors) -> list[str]:
    return sorted(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())


def start_paths(roles: Mapping[str, Role]) -> dict[str, str]:
    """Paths of the models that roles start from, including those that are not trained."""
    return {name: role.path for name, role in roles.items() if role.path}


def kept(roles: Mapping[str, Role]) -> dict[str, Role]:
    """The roles whose weights stand in a checkpoint."""
    return {name: role for name, role in roles.items() if role.weights_change}
