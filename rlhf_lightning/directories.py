"""Directories that appear whole or not at all, also if the writer dies, the disk is full or power fails.

A directory is written beside its place, as `.saving-...`, and renamed into it. Replacing one keeps the old as
`<name>-replaced` until the new one stands: a crash between the two renames leaves that.
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from uuid import uuid4

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk. An error of a device process has only their text in its message."""


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a fresh directory to write into; on success it becomes `target`, on failure nothing changes.

    Args:
        target: the directory; an existing one is replaced.

    Raises:
        OSError: it cannot be written there; its file name is the target where the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    old = replaced(target)
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


def remove(target: Path) -> None:
    """Remove a directory if there is one: it is renamed first, so that it is never there in part."""
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


def replaced(target: Path) -> Path:
    """Where the old directory is kept until the new one stands."""
    return target.parent / f"{target.stem}-replaced{target.suffix}"  # also of `.`, which has no name


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


def _unfinished(target: Path) -> Path:
    """A new path beside the target that tells who writes what: `.saving-<host>-<pid>-<target>-<unique>`."""
    return (
        target.parent
        / f".saving-{_checksum(gethostname())}-{os.getpid()}-{_checksum(target.name)}-{uuid4().hex}"
    )


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


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


def _flush(*paths: Path) -> None:
    """Flush files and directories to the disk, so that they are complete if power fails after the rename."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
