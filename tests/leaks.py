"""What a test leaves behind: environment variables, threads, processes, listening ports, files.

`Traces.take` looks, `Traces.left` compares: conftest.py does both around every test, module and session. A
look costs milliseconds. Linux tells of processes and ports through /proc; elsewhere these are left out.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Look = Literal["none", "top", "all"]
"""Which files are looked at."""

MARK = "RLHF_LIGHTNING_TEST_SESSION"
"""Environment variable that every process started by a test inherits, even if its parent has died."""

GRACE_S = 5.0
"""Threads and processes that were told to end get this long, in seconds."""

_IGNORED_VARIABLES = (
    *("PYTEST_", "PYTHONBREAKPOINT", "RAY_AUTH_MODE"),
    *("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"),
)
"""The second and third are set by ray.init, the others by torch as it imports its compiler and compiles."""
_IGNORED_FOLDERS = frozenset({".git", ".venv", ".venvs", "__pycache__", "build", "dist", "results"})
_IGNORED_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_OTHERS: set[int] = set()
"""Numbers of processes that this one has not started: nobody's leak, and not looked at again."""
_CLUSTERS = ("raylet", "warm_workers")
"""What starts the workers of a cluster."""


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    """Its number."""
    parent: int
    """Number of the process that started it, or that adopted it."""
    command: str
    """Its command line, which Ray replaces by `ray::Actor.method`."""


@dataclass(frozen=True)
class Status:
    """What /proc tells of a process in one read."""

    parent: int
    """Number of the process that started it, or that adopted it."""
    started: int
    """Clock ticks after the machine came up."""


@dataclass(frozen=True)
class Traces:
    """What is there at one moment."""

    environment: Mapping[str, str]
    """Environment variables."""
    threads: Mapping[int, str]
    """Non-daemon threads: identity -> name."""
    processes: Mapping[int, Process]
    """Processes that this one started, directly or not."""
    ports: frozenset[int]
    """TCP ports on which this process listens."""
    files: frozenset[str]
    """Paths below the root, relative to it."""

    @classmethod
    def take(cls, root: Path, *, files: Look = "top") -> Traces:
        """Look at this process, and at the entries of `root`, at all files below it, or at none."""
        return cls(
            environment={k: v for k, v in os.environ.items() if not k.startswith(_IGNORED_VARIABLES)},
            threads={t.ident or 0: t.name for t in threading.enumerate() if t.is_alive() and not t.daemon},
            processes={p.pid: p for p in _started_processes()},
            ports=frozenset(_listening_ports()),
            files=frozenset(_files(root, look=files)),
        )

    def left(self, after: Traces) -> list[str]:
        """Say in words what `after` has and this has not, and which variables differ."""
        names = sorted(self.environment.keys() | after.environment.keys())
        words = [
            f"environment variable {name}: {self.environment.get(name)!r} -> {after.environment.get(name)!r}"
            for name in names
            if self.environment.get(name) != after.environment.get(name)
        ]
        words += [f"thread {name!r}" for ident, name in after.threads.items() if ident not in self.threads]
        words += [f"process {p.pid}: {p.command[:120]}" for p in self._new_processes(after)]
        words += [f"listening port {port}" for port in sorted(after.ports - self.ports)]
        words += [f"file {name}" for name in sorted(after.files - self.files)]
        return words

    def _new_processes(self, after: Traces) -> Iterator[Process]:
        """Leave out the pool that a cluster older than this look keeps: not its actors and running tasks."""
        clusters = {p.pid for p in self.processes.values() if any(name in p.command for name in _CLUSTERS)}
        for process in after.processes.values():
            busy = process.command.startswith("ray::") and not process.command.startswith("ray::IDLE")
            pooled = bool(clusters & set(ancestors(process.pid, after.processes))) and not busy
            if process.pid not in self.processes and not pooled:
                yield process


def settled(before: Traces, root: Path, *, files: Look = "top", grace_s: float | None = None) -> list[str]:
    """Compare again and again until nothing is left or the grace is over."""
    deadline = time.monotonic() + (GRACE_S if grace_s is None else grace_s)
    while (words := before.left(Traces.take(root, files=files))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return words


def restore(environment: Mapping[str, str]) -> None:
    """Give the variables their values of `environment`, so that one leak is reported once."""
    for name in [name for name in os.environ if not name.startswith(_IGNORED_VARIABLES)]:
        if name not in environment:
            del os.environ[name]
    os.environ.update(environment)


def ancestors(pid: int, table: Mapping[int, Process] | Mapping[int, Status]) -> Iterator[int]:
    """Numbers of the parent of a process, of its parent, and so on, as far as the table knows them."""
    while pid in table and table[pid].parent in table:
        pid = table[pid].parent
        yield pid


def _started_processes() -> list[Process]:
    """Descendants of this process, and orphans that carry its mark."""
    table = dict(process_table())
    own = os.getpid()
    mark = f"{MARK}={os.environ.get(MARK, '-')}".encode()
    started: dict[int, bool] = {own: True}

    def is_started(pid: int) -> bool:
        if pid not in started:
            status = table.get(pid)
            started[pid] = (
                status is not None
                and status.started >= table[own].started  # saves a look at every older process
                and (is_started(status.parent) or mark in _read(f"/proc/{pid}/environ"))
            )
        return started[pid]

    pids = [pid for pid in table if pid != own and is_started(pid)]
    _OTHERS.update(table.keys() - pids - {own})
    processes = [Process(pid, table[pid].parent, _command(pid)) for pid in pids]
    return [p for p in processes if not any(name in p.command for name in _IGNORED_PROCESSES)]


def process_table() -> Iterator[tuple[int, Status]]:
    """Numbers of the processes that run, but for those that are known to be others'."""
    entries = [entry for entry in _entries("/proc") if entry.isdigit()]
    _OTHERS.intersection_update(map(int, entries))  # a number may come to be another process's
    for entry in entries:
        if int(entry) in _OTHERS:
            continue
        status = _read(f"/proc/{entry}/stat").rpartition(b") ")[2].split()
        if len(status) > 1 and status[0] not in (b"Z", b"X"):
            yield int(entry), Status(parent=int(status[1]), started=int(status[19]))


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _listening_ports() -> Iterator[int]:
    """Asks every socket, since the kernel's table of all connections takes milliseconds to read."""
    for entry in _entries("/proc/self/fd"):
        if not _link(f"/proc/self/fd/{entry}").startswith("socket:"):
            continue
        try:
            port = _listening_port(int(entry))
        except OSError:  # closed meanwhile
            continue
        if port is not None:
            yield port


def _listening_port(descriptor: int) -> int | None:
    """The TCP port on which a socket listens."""
    asked = socket.socket(fileno=descriptor)
    try:
        internet = asked.family in (socket.AF_INET, socket.AF_INET6) and asked.type == socket.SOCK_STREAM
        if internet and asked.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return int(asked.getsockname()[1])
        return None
    finally:
        asked.detach()  # it is somebody else's, who closes it


def _files(root: Path, *, look: Look) -> Iterator[str]:
    for folder, folders, names in os.walk(root) if look != "none" else ():
        folders[:] = [name for name in folders if not (name in _IGNORED_FOLDERS or name.endswith("_cache"))]
        here = os.path.relpath(folder, root)
        yield from (os.path.normpath(os.path.join(here, name)) for name in (*names, *folders))
        if look == "top":
            return


def _entries(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return b""
