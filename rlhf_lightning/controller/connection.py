"""The controller's connection to Ray: one of its own on this machine, or a cluster that runs already."""

from __future__ import annotations

import functools
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import torch
from ray._common.utils import get_default_system_temp_dir
from ray._private import services, utils
from ray._private.node import Node
from ray._private.utils import estimate_available_memory, resolve_object_store_memory
from ray.exceptions import AuthenticationError

from rlhf_lightning.controller.errors import WorkerTimeoutError
from rlhf_lightning.environment import defaults, replaced

OPTION = "strategy.address"
"""What an address is written for, unless it comes from the environment."""
LOCAL = "local"
"""The address that stands for a Ray of the job's own on this machine."""
SOCKET_BYTES = 107
"""Longest path of a socket on Linux."""
ANSWER_S = 5.0
"""Longest wait for the head of a cluster to answer."""

TERMINATED = threading.Event()
"""Set once SIGTERM has come to a process that is connected: where Ray waits, it makes the exit code 1."""

_OWN: Mapping[str, Any] = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
"""Ray's workers would let every other process of the machine go first; one of two threads then starves."""
_QUIET: Mapping[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
"""Ray says what went wrong, and devices what they like."""
_ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""Of what a thread has freed at the end of a heap of its own, glibc gives nothing back."""
_NOBODY_ASKS = dict.fromkeys(("start_api_server", "start_monitor"), lambda *_, **__: None)
"""Of a Ray of the job's own: without a dashboard it starts the dashboard's server too, and waits for it, a
third of its start; its monitor would start nodes."""
_SETTINGS = b"\x04"
"""The type of the frame with which both sides of HTTP/2, and so of gRPC, begin (RFC 9113 section 3.4)."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" * 5
"""What a client says first: the preface and an empty frame of settings."""
_BE_A_NODE = (
    "Run rlhf on one of its nodes, or make this machine one: `ray start --address HOST:PORT`, with "
    "`--num-cpus 0 --num-gpus 0` for one without devices."
)


def check_address(address: str, origin: str = OPTION) -> None:
    """Refuse an address at which nothing answers, in seconds rather than minutes.

    Args:
        address: `auto` or host:port.
        origin: the option or the variable that says so.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        raise ValueError(
            f"{origin}={address!r}: write host:port of the cluster's head, such as 10.0.0.1:6379, or type "
            "--strategy.address local to use this machine."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as head:
            head.sendall(_GREETING)
            answered = _encrypted() or head.recv(4, socket.MSG_WAITALL)[3:] == _SETTINGS
        reason = "" if answered else "what listens there is not Ray"
    except OSError as err:
        reason = str(err)
    if reason:
        raise ValueError(
            f"{origin}={address!r}: no Ray cluster answers there ({reason}). Start one with `ray start "
            "--head`, or type --strategy.address local to use this machine."
        )


def check_sockets() -> None:
    """Refuse a directory for temporary files in which Ray cannot make its sockets."""
    folder = get_default_system_temp_dir()
    longest = f"/ray/session_YYYY-MM-DD_HH-MM-SS_ffffff_{os.getpid()}/sockets/plasma_store"
    room = SOCKET_BYTES - len(longest)
    if not folder.isascii():
        wrong = "is not ASCII"
    elif len(folder) > room:
        wrong = f"has {len(folder)} characters, and room for {room}"
    else:
        return
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    raise ValueError(f"{name}={folder}: {wrong}: Ray makes its sockets there. Set RAY_TMPDIR=/tmp.")


def check_limit() -> None:
    """Refuse limits of memory and of files that are too low for Ray's core, which would abort this process.

    Raises:
        ValueError: `ulimit -v` is below Ray's object store, which every process maps, and this process; or
            `ulimit -f` below the store, which is a file.
    """
    (memory, _), (file, _) = map(resource.getrlimit, (resource.RLIMIT_AS, resource.RLIMIT_FSIZE))
    if memory == file == resource.RLIM_INFINITY:
        return
    store = resolve_object_store_memory(estimate_available_memory())
    pages, _ = Path("/proc/self/statm").read_text().split(maxsplit=1)
    mapped = store + int(pages) * resource.getpagesize()
    for letter, limit, least in (("v", memory, mapped), ("f", file, store)):
        if limit != resource.RLIM_INFINITY and limit < least:
            raise ValueError(
                f"ulimit -{letter} is {limit // 1024}: each process maps Ray's object store, a file of "
                f"{store / 2**30:.1f} GiB, and this limit counts it. Type `ulimit -{letter} unlimited` "
                "first, or --strategy local."
            )


def check_connected(address: str) -> None:
    """Refuse an address other than that of the cluster to which this process is connected."""
    connected = str(ray.get_runtime_context().gcs_address)
    if address not in ("auto", connected):
        raise ValueError(
            f"{OPTION}={address!r}: this process is connected to the Ray at {connected}. Call ray.shutdown() "
            "first, or leave the address out to use that one."
        )


def _encrypted() -> bool:
    """Whether Ray's ports speak TLS, and so do not answer a greeting in the clear."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def start_ray(num_cpus: int) -> None:
    """Start Ray on this machine, for this job alone, with the GPUs that torch can use.

    Raises:
        WorkerTimeoutError: it takes longer than Ray waits.
    """
    try:
        with (
            _heeding_sigterm(),
            _uninterrupted(signal.SIGINT),
            _apart(),
            replaced(Node, _NOBODY_ASKS),
            defaults(_ONE_HEAP),
        ):
            # Left to itself Ray counts GPUs for which torch may not have been built.
            gpus = torch.cuda.device_count()
            ray.init(address=LOCAL, num_cpus=num_cpus, num_gpus=gpus, **_OWN, **_QUIET)
    except Exception as err:  # Ray has no narrower one for this
        if type(err) is not Exception:
            raise
        raise WorkerTimeoutError(
            f"Ray did not start on this machine: {err} Try again when it has less to do, or start Ray by "
            "hand (`ray start --head`) and type --strategy.address auto."
        ) from err


def join(address: str, origin: str = OPTION) -> None:
    """Join a cluster that runs already.

    Args:
        address: `auto` or host:port.
        origin: the option or the variable that says so.

    Raises:
        ValueError: it cannot be joined.
    """
    said = f"{origin}={address!r}: no Ray cluster can be joined there"
    if address != "auto" and not services.find_node_ids():  # Ray would look for one for a minute
        raise ValueError(f"{said} from this machine, on which no Ray runs. {_BE_A_NODE}")
    try:
        with _heeding_sigterm(), _uninterrupted(signal.SIGINT):
            ray.init(address=address, **_QUIET)
    except RuntimeError as err:
        if not str(err).startswith("Version mismatch"):
            raise
        raise ValueError(
            f"{said}. {' '.join(str(err).split())}. Start Ray on all nodes from the environment of this "
            "command, or run it in theirs."
        ) from err
    except (ConnectionError, AuthenticationError) as err:  # there is no token here
        raise ValueError(
            f"{said} ({err}). One that asks for a token wants RAY_AUTH_MODE=token here, too, its token in "
            f"~/.ray/auth_token or RAY_AUTH_TOKEN, and this machine must be one of its nodes. {_BE_A_NODE}"
        ) from err


@contextmanager
def _uninterrupted(ends: signal.Signals) -> Iterator[None]:
    """Within this context a signal that ends this process waits, and the second one does not.

    Ray cannot be ended before it is up: its core then crashes this process, or its agents stay for a minute.
    """
    theirs, came = signal.getsignal(ends), list[int]()
    if not callable(theirs) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def wait(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            theirs(number, frame)

    signal.signal(ends, wait)
    try:
        yield
    finally:
        signal.signal(ends, theirs)  # Ray's core sets one of its own for SIGTERM
    if came:
        signal.raise_signal(ends)


@contextmanager
def _apart() -> Iterator[None]:
    """Ray's own processes get groups of their own, so that a signal to this one's leaves them to `close`.

    The kernel ends them with this process, however it ends. On other systems Ray does that by the group.
    """
    grouped = functools.partial(services.ConsolePopen, process_group=0)
    with replaced(services, {"ConsolePopen": grouped} if sys.platform == "linux" else {}):
        yield


@contextmanager
def _heeding_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as it would without Ray, from now on and after this context, as Ray is up.

    Ray's core aborts, and its Python ends with 15, or 1 while it starts; it may set no handler of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    with replaced(utils, {"set_sigterm_handler": lambda _: None}), _uninterrupted(signal.SIGTERM):
        yield


def _end(number: int, _frame: FrameType | None) -> None:
    TERMINATED.set()
    signal.alarm(0)  # by which Ray's core would abort in 3 s, where it has caught the signal as it starts
    sys.exit(128 + number)
