"""Checkpoint directories: a role's shards beside the trainer's state, whole or absent, and free of pickles.

    last.ckpt/
        trainer.json           loops, callbacks, data position; tensors refer to tensors.safetensors
        tensors.safetensors    the algorithm's own buffers, and tensors of callbacks
        actor/ critic/         what the engines wrote: safetensors shards and JSON

A checkpoint is written beside its place and renamed into it. Replacing one keeps the old directory as
`last-replaced.ckpt` until the new one stands: if a crash falls between the two renames, reading `last.ckpt`
falls back to it, and `ckpt_path="last"` finds it by its name.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rlhf_lightning.controller import Batch
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
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk. An error of a device process has only their text in its message."""


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a fresh directory to write into; on success it becomes `target`, on failure nothing changes.

    Args:
        target: the checkpoint's directory; an existing one is replaced.

    Raises:
        OSError: it cannot be written there; its file name is the target where the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    old = _replaced(target)
    with _beside(target, of=target, left="the checkpoint before it, if there is one, is as it was") as fresh:
        yield fresh
        _flush(*fresh.rglob("*"), fresh)
        if target.exists():
            remove(old)
            target.rename(old)
        fresh.rename(target)
        _flush(target.parent)
        remove(old)


@contextmanager
def adding(target: Path, *, last: str, replaces: Collection[str]) -> Iterator[Path]:
    """Yield a fresh directory to write into; on success its files move into `target`, on failure none does.

    Args:
        target: a directory, created if it does not exist; its other files stay.
        last: name of the file that moves last: readers take the directory as complete only if it is there.
        replaces: patterns of old files in `target` that are removed.

    Raises:
        OSError: it cannot be written there; its file name is the target where the disk is full.
    """
    made = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        with _beside(target / last, of=target, left="nothing was written there") as fresh:
            yield fresh
            written = sorted((file for file in fresh.rglob("*") if file.is_file()), key=(fresh / last).__eq__)
            places = {file: target / file.relative_to(fresh) for file in written}
            folders = {place.parent for place in places.values()}  # `target` among them, as it holds `last`
            _flush(*fresh.rglob("*"))
            for folder in folders:
                folder.mkdir(exist_ok=True, parents=True)
            (target / last).unlink(missing_ok=True)
            for old in {file for pattern in replaces for file in target.glob(pattern) if file.is_file()}:
                old.unlink()
            for file, place in places.items():
                file.replace(place)
            _flush(*folders)
    finally:
        if made and not any(target.iterdir()):
            target.rmdir()


@contextmanager
def _beside(place: Path, *, of: Path, left: str) -> Iterator[Path]:
    """Yield a fresh directory beside a path, and remove it at the end; first remove what dead writers left.

    Args:
        place: where what is written will be moved to.
        of: path that errors name.
        left: what there is in the end if the disk is full, for the message.
    """
    sweep(place)
    fresh = _unfinished(place)
    try:
        fresh.mkdir()
    except OSError as err:
        raise OSError(err.errno, err.strerror, str(of)) from err
    try:
        yield fresh
    except Exception as err:
        if full := next((number for number in FULL if os.strerror(number) in str(err)), None):
            raise OSError(full, f"{os.strerror(full)}; {left}", str(of)) from err
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def remove(target: Path) -> None:
    """Remove a checkpoint if there is one: it is renamed first, so that it is never there in part."""
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        rest = target.rename(_unfinished(target))
        shutil.rmtree(rest, ignore_errors=True)


def sweep(target: Path) -> None:
    """Remove what writers that died, or were interrupted in this process, have left beside a target."""
    for unfinished in target.parent.glob(".saving-*"):
        if _is_left_over(unfinished, target):
            shutil.rmtree(unfinished, ignore_errors=True)


def find_complete(target: Path) -> Path | None:
    """Directory of the complete checkpoint of a path, or None.

    It is the path itself, or `<name>-replaced` beside it if its writer died between the two renames.
    """
    places = (target, _replaced(target))
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


def _unfinished(target: Path) -> Path:
    """A new path beside the target that tells who writes what: `.saving-<host>-<pid>-<target>-<unique>`."""
    return (
        target.parent
        / f".saving-{_checksum(gethostname())}-{os.getpid()}-{_checksum(target.name)}-{uuid4().hex}"
    )


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


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


def _is_left_over(unfinished: Path, target: Path) -> bool:
    """Whether its writer has died; on another host, where that is unknown, whether it wrote this target."""
    _, host, pid, name, *_ = [*unfinished.name.split("-"), "", "", ""]
    if host != _checksum(gethostname()):
        return name == _checksum(target.name)
    return int(pid) == os.getpid() or not _is_alive(int(pid))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as err:
        return not isinstance(err, ProcessLookupError)  # else it runs under another user
    return True


def _replaced(target: Path) -> Path:
    return target.with_name(f"{target.stem}-replaced{target.suffix}")


def _flush(*paths: Path) -> None:
    """Flush files and directories to the disk, so that they are complete if power fails after the rename."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
