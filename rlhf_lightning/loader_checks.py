"""Checks of a run's loaders: whether there are any, how many, and of how many batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from rlhf_lightning.data import row_data
from rlhf_lightning.stepping import check_encoded
from rlhf_lightning.trainer_habits import validation_interval

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource

    from rlhf_lightning.algorithm import RLHFAlgorithm

_READ: Mapping[str, Sequence[str]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
"""The loaders that a trainer's method reads."""


def check_loaders(trainer: Trainer) -> None:
    """Refuse loaders that are missing or too many, and shares or intervals that do not fit their batches.

    Raises:
        ValueError: there are no data; the loader has no length, or is rows; a step takes the batches of one
            loader, and there are several; a share is less than a batch; or an epoch has fewer iterations than
            lie between two validations.
    """
    _check_given(trainer)
    _check_length(trainer)
    _check_several(trainer)
    _check_shares(trainer)
    _check_reached(trainer)


def _check_given(trainer: Trainer) -> None:
    """Refuse a run without data: Lightning would, with all models loaded."""
    task, data = trainer.state.fn, trainer.datamodule  # type: ignore[attr-defined]
    if not task or _source(trainer, kind := _READ[task][0]).is_defined():
        return
    if task == "test":
        instead = "dataloaders=...): data modules hold rows out for trainer.validate, none for a test."
    elif data is None:
        instead = "datamodule=PromptData(path=...)), or with another data module; TaskData() needs no file."
    else:
        name = f"{kind}_dataloader"
        raise ValueError(f"{type(data).__name__} has no {name}, and {task.value} reads it. Write one.")
    raise ValueError(f"trainer.{task.value}: there are no data. Type trainer.{task.value}(..., {instead}")


def _check_length(trainer: Trainer) -> None:
    """Refuse rows in place of a training loader, and one without a length: Lightning takes a batch ahead."""
    if trainer.state.fn != "fit" or not trainer.limit_train_batches:
        return
    module = cast("RLHFAlgorithm", trainer.lightning_module)
    for loader in _loaders(_source(trainer, "train")).flattened:
        if isinstance(loader, Mapping):  # one of a list; Lightning takes each for a batch
            check_encoded(module, loader, what="a row")
        elif isinstance(names := getattr(loader, "column_names", None), Sequence):
            check_encoded(module, names, what=f"a row of {type(loader).__name__}")
        if sized_len(loader) is None:
            raise ValueError(
                f"{type(loader).__name__}: it gives training batches and has no length. One would be taken "
                "ahead, before the step that it follows, and never be trained on after a resume. Give its "
                "sampler, or its IterableDataset, a __len__: the rows of an epoch, as many as you like."
            )


def _check_several(trainer: Trainer) -> None:
    """Refuse several loaders for a step that takes one: Lightning would, with models loaded."""
    kind = _READ[trainer.state.fn][-1] if trainer.state.fn else "val"
    name, source = "validation_step" if kind == "val" else f"{kind}_step", _source(trainer, kind)
    if row_data(trainer) or not getattr(trainer, f"limit_{kind}_batches") or not source.is_defined():
        return
    loaders, module = _loaders(source), trainer.lightning_module
    count = len(loaders.flattened) if loaders._mode == "sequential" else 1
    if count > 1 and not is_param_in_hook_signature(getattr(module, name), "dataloader_idx"):
        raise ValueError(
            f"{type(module).__name__}.{name} takes the batches of one loader, and there are {count}. Give "
            f"one, or write a {name}(self, batch, batch_idx, dataloader_idx=0) of your own."
        )


def _source(trainer: Trainer, kind: str) -> _DataLoaderSource:
    """Where the loaders of a kind come from."""
    if kind == "val":
        within = trainer.state.fn == "fit"
        return (trainer.fit_loop.epoch_loop.val_loop if within else trainer.validate_loop)._data_source
    other = trainer.test_loop if kind == "test" else trainer.predict_loop
    return (trainer.fit_loop if kind == "train" else other)._data_source


def _loaders(source: _DataLoaderSource) -> CombinedLoader:
    """The loaders of a trainer's loop; a module makes them anew."""
    found = source.dataloader()
    return found if isinstance(found, CombinedLoader) else CombinedLoader(found, "sequential")


def _check_shares(trainer: Trainer) -> None:
    """Refuse a share of less than a batch: Lightning would, with all models loaded."""
    data = row_data(trainer)
    for kind in _READ[trainer.state.fn] if data and trainer.state.fn else ():
        limit = getattr(trainer, f"limit_{kind}_batches")
        if not 0 < limit < 1:  # a number of batches, none or all
            continue
        overfits = kind in ("train", "val") and trainer.overfit_batches  # type: ignore[attr-defined]
        option = "overfit_batches" if overfits else f"limit_{kind}_batches"
        loaders = CombinedLoader(getattr(data, f"{kind}_dataloader")(), "sequential").flattened
        for batches in filter(None, map(sized_len, loaders)):
            if limit * batches < 1:
                raise ValueError(
                    f"Trainer({option}={limit}): a share of {limit} of {batches} is less than a batch. Type "
                    f"--trainer.{option} 1 for one batch, or {1 / batches:.3g} or more."
                )


def _check_reached(trainer: Trainer) -> None:
    """Refuse an interval, counted anew in each epoch, of more iterations than one has."""
    data, interval, limit = row_data(trainer), validation_interval(trainer), trainer.limit_train_batches
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
