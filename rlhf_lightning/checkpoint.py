"""Checkpoints: a role's shards beside the trainer's state, free of pickles.

    last.ckpt/
        trainer.json           loops, callbacks, data position; tensors refer to tensors.safetensors
        tensors.safetensors    the algorithm's own buffers, and tensors of callbacks
        actor/ critic/         what the engines wrote: safetensors shards and JSON

It appears whole, by `directories.replacing`. If a crash falls between its two renames, reading `last.ckpt`
falls back to `last-replaced.ckpt`, and `ckpt_path="last"` finds it by its name.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rlhf_lightning.controller import Batch
from rlhf_lightning.directories import replaced
from rlhf_lightning.engines import save_file
from rlhf_lightning.spec import CHECKPOINT

logger = logging.getLogger(__name__)

TENSORS = "tensors.safetensors"
FORMAT = 1
MODELS = "models"
"""Key of the state: the architectures of the trained roles."""
IN_FLIGHT = "in_flight"
"""Key of the state: columns of the prompts whose answers were under way."""
PATHS = "paths"
"""Key of the state: by role, the directory that its model was loaded from when the run began."""
_PARTS = ("state_dict", "loops", "callbacks", "optimizer_states")
"""Containers in the state without which a fit cannot continue."""
Column = torch.Tensor | list[object]
"""A column of rows in a checkpoint."""
_KINDS: dict[str, type[tuple[object, ...] | set[object] | frozenset[object]]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
}
"""Containers beside lists that JSON lacks, by the key under which their items stand."""
_INSTEAD = {
    Batch: "Put in its fetch(), which on_load_checkpoint() makes a batch of again by Batch.of(...).",
    np.ndarray: "Put in torch.from_numpy(...) of it.",
    deque: "Put in list(...) of it.",
}
"""What to put into a checkpoint in the place of values that it cannot hold."""


def find_complete(target: Path) -> Path | None:
    """Directory of the complete checkpoint of a path, or None.

    It is the path itself, or `<name>-replaced` beside it if its writer died between the two renames.
    """
    places = (target, replaced(target))
    return next((place for place in places if (place / CHECKPOINT).is_file()), None)


def find(path: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint.

    Raises:
        ValueError: there is no complete checkpoint at the path.
    """
    target = Path(path)
    if found := find_complete(target):
        return found
    what = "is not there" if not target.exists() else f"holds no {CHECKPOINT}"
    if (target.parent / CHECKPOINT).is_file():
        raise ValueError(f"{str(path)!r} lies in a checkpoint. Type {target.parent}.")
    held = (*target.glob("*.ckpt"), *target.glob("checkpoints/*.ckpt"))
    if inside := sorted(str(found) for found in held if find_complete(found)):
        raise ValueError(f"{str(path)!r} is not a checkpoint, and holds some. Type one: {', '.join(inside)}.")
    if (target / "config.json").is_file():
        begin = f"To begin a run with it, type --algo.actor.path {path} in place of --ckpt_path."
        raise ValueError(f"{str(path)!r} is a model, no checkpoint. {begin}")
    raise ValueError(f"checkpoint {str(path)!r} {what}; {_beside_it(target)}")


def _beside_it(target: Path) -> str:
    """The other complete checkpoints of its directory, in words."""
    others = sorted(path.name for path in target.parent.glob("*.ckpt") if (path / CHECKPOINT).is_file())
    return f"beside it: {[name for name in others if name != target.name] or 'no checkpoint'}."


def write_state(directory: Path, state: Mapping[str, object]) -> None:
    """Write the trainer's state.

    Raises:
        TypeError: a value is neither number, text, tensor nor a container of such; the message says where.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain = {"format": FORMAT, "state": _encode(dict(state), "state", tensors)}
    if tensors:
        save_file(tensors, directory / TENSORS)
    (directory / CHECKPOINT).write_text(json.dumps(plain, indent=1))


def with_own(path: str | Path, state: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """A checkpoint's state, with what is kept under keys that are taken.

    Args:
        path: of the checkpoint, for the message.
        state: of the trainer, with what `on_save_checkpoint` of the algorithm and of callbacks has added.
        own: values by key.

    Raises:
        ValueError: something was added under such a key: it would be lost.
    """
    if taken := sorted({*own, IN_FLIGHT} & state.keys()):
        raise ValueError(
            f"{path}: on_save_checkpoint has put something under {taken[0]!r}, where something else stands. "
            f"Nothing was written. Call it otherwise, such as 'my_{taken[0]}'."
        )
    return {**state, **own}


def columns_of(rows: Batch | None, *, what: str) -> dict[str, object]:
    """The fetched columns of rows, for a checkpoint; none, and a warning, where it cannot hold their values.

    Args:
        rows: to keep; None for none.
        what: what they are, for the warning.
    """
    columns: dict[str, object] = {} if rows is None else {**rows.fetch()}
    try:
        _encode(columns, "", {})
    except TypeError:
        logger.warning("%s hold values that a checkpoint cannot hold, and are left out of it.", what)
        return {}
    return columns


def read_state(directory: Path, *, resuming: bool = False) -> dict[str, object]:
    """Read what `write_state` wrote.

    Args:
        directory: of the checkpoint.
        resuming: for a fit, which needs more of it than the models.

    Raises:
        ValueError: a file may not be read, is damaged or of another format, or lacks what a fit needs.
    """
    _check_readable(directory)
    try:
        plain = json.loads((directory / CHECKPOINT).read_text())
        tensors = load_file(directory / TENSORS) if (directory / TENSORS).is_file() else {}
    except (OSError, ValueError, SafetensorError) as err:
        raise ValueError(_unusable(directory, f"{CHECKPOINT} or {TENSORS} is damaged ({err})")) from err
    if not isinstance(plain, dict) or not isinstance(plain.get("state"), dict):
        raise ValueError(_unusable(directory, f"{CHECKPOINT} is not the state of a checkpoint"))
    if plain.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {directory}: is of format {plain.get('format')}, this version reads {FORMAT}."
        )
    try:
        state = _decode(plain["state"], tensors)
    except KeyError as err:
        why = f"{TENSORS} lacks {err}: it belongs to another checkpoint"
        raise ValueError(_unusable(directory, why)) from err
    assert isinstance(state, dict)
    lacking = [name for name in _PARTS if resuming and not isinstance(state.get(name), dict | list)]
    if lacking:
        why = f"its {CHECKPOINT} has no {lacking[0]}: it is damaged, or was saved with save_weights_only"
        raise ValueError(_unusable(directory, why))
    return state


def _check_readable(directory: Path) -> None:
    """Refuse files that are closed to this user, of which safetensors would say that they are not there."""
    for file in (directory / CHECKPOINT, directory / TENSORS):
        if file.is_file() and not os.access(file, os.R_OK):
            raise ValueError(
                f"{file}: may not be read by this user. Ask its owner to type `chmod -R a+rX {directory}`, "
                "or type another checkpoint."
            )


def _unusable(directory: Path, why: str) -> str:
    return (
        f"checkpoint {directory}: {why}. Copy it again, or type another checkpoint; {_beside_it(directory)}"
    )


def check_models(path: str | Path, saved: Collection[str], wanted: Collection[str]) -> None:
    """Refuse to write a checkpoint without models after their devices have ended.

    Raises:
        RuntimeError: models belong into it, and none was saved.
    """
    if wanted and not saved:
        raise RuntimeError(
            f"{path}: the run has ended, and {', '.join(wanted)} with its devices. Nothing was written. Save "
            "within the run: a callback such as ModelCheckpoint(save_last=True), or on_train_end."
        )


def _encode(value: object, where: str, tensors: dict[str, torch.Tensor]) -> object:
    """A value as JSON; what it lacks has one key: `$tensor`, `$tuple`, `$set`, `$frozenset` or `$items`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.integer | np.floating | os.PathLike):
        return str(value) if isinstance(value, os.PathLike) else value.item()
    if isinstance(value, torch.Tensor):
        name = where
        while name in tensors:  # the key `a.b` and the key b of a have one name
            name += "'"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"$tensor": name}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        marks = [mark for mark, kind in _KINDS.items() if isinstance(value, kind)]
        return {marks[0]: items} if marks else items
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, tensors)
    others = (told for kind, told in _INSTEAD.items() if isinstance(value, kind))
    raise TypeError(
        f"a checkpoint cannot hold {where}, a {type(value).__module__}.{type(value).__qualname__}: only "
        "numbers, texts, tensors and containers of them, so that loading runs no code. "
        + next(others, "Turn it into such in state_dict() or on_save_checkpoint().")
    )


def _encode_mapping(value: Mapping[object, object], where: str, tensors: dict[str, torch.Tensor]) -> object:
    pairs = [(key, _encode(item, f"{where}.{key}", tensors)) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$items": [[_encode(key, f"{where}.{key}", tensors), item] for key, item in pairs]}


def _decode(value: object, tensors: Mapping[str, torch.Tensor]) -> object:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    for name, kind in _KINDS.items():
        if name in value:
            return kind(_decode(item, tensors) for item in value[name])
    if "$items" in value:
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["$items"]}
    return {key: _decode(item, tensors) for key, item in value.items()}
