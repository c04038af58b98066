"""Workers of the tests' clusters fork from one process that has imported what a device imports.

Imports are most of what a device costs in a test: eight or nine seconds of a core. Ray starts a worker with
`python SETUP_WORKER default_worker.py ...`. Here SETUP_WORKER is this file, which only sends its arguments,
environment and streams to the process of `warm`. That one forks a keeper for each node and job, since Ray
reads their variables as it is imported; the keeper imports Ray and forks, and the child becomes the worker.
Tests that run a command in a process of its own, which starts Ray by itself, do without.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SOCKET = "RLHF_LIGHTNING_TEST_WARM_WORKERS"
"""Environment variable of a node: the path of the socket on which the process that forks listens."""
OPTIONS = {"setup_worker_path": __file__}
"""Of a node, beside `num_cpus` and the like."""
STREAMS = (0, 1, 2)
ON_RAY = ("ray._private.workers.setup_worker", "rlhf_lightning.strategies")
"""What every keeper imports: what workers do, and roles and callbacks of tests."""


@contextmanager
def warm(*modules: str, on_ray: Sequence[str] = ()) -> Iterator[str]:
    """Let the workers of nodes with OPTIONS have imported these modules as they start; yields SOCKET.

    The processes that fork end with the block, or with this process.

    Args:
        modules: those that do not import Ray.
        on_ray: others.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path := os.path.join(folder, "socket"))
        listening.listen(64)
        command = [
            sys.executable,
            __file__,
            "serve",
            str(listening.fileno()),
            ",".join([*ON_RAY, *on_ray]),
            *modules,
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listening.fileno()]) as server:
            try:
                yield path
            finally:
                assert server.stdin is not None
                server.stdin.close()


def _serve(listening: int, on_ray: list[str], modules: list[str]) -> None:
    with socket.socket(fileno=listening) as server:
        _import(modules)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
        keepers: dict[str, socket.socket] = {}
        while server in select.select([server, sys.stdin], [], [])[0]:
            client, _ = server.accept()
            with client:
                _, streams, _, _ = socket.recv_fds(client, 1, len(STREAMS))
                with client.makefile("rb") as file:
                    asked = json.load(file)
            read = json.dumps({k: v for k, v in sorted(asked["environment"].items()) if k.startswith("RAY_")})
            if read not in keepers:
                keepers[read] = _keeper(asked["environment"], on_ray, [server, *keepers.values()])
            socket.send_fds(keepers[read], [json.dumps(asked).encode()], streams)
            for stream in streams:
                os.close(stream)
        for keeper in keepers.values():
            keeper.close()
        with suppress(ChildProcessError):
            os.wait()  # for all of them


def _import(modules: Sequence[str]) -> None:
    gc.disable()
    for name in modules:
        __import__(name)
    gc.freeze()  # else every worker's collector would look at all of them
    gc.enable()


def _keeper(environment: dict[str, str], on_ray: list[str], others: list[socket.socket]) -> socket.socket:
    """A process that has imported Ray in an environment, which Ray reads then, and what stands on Ray."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for end in (ours, *others):
            end.close()
        _set(environment)
        _import(on_ray)
        _fork(theirs)
    theirs.close()
    return ours


def _fork(end: socket.socket) -> None:
    """Fork into workers until nobody can ask for one."""
    while (received := socket.recv_fds(end, 2**20, len(STREAMS)))[0]:
        asked, streams = json.loads(received[0]), received[1]
        if os.fork() == 0:
            end.close()
            for number, stream in zip(STREAMS, streams, strict=True):
                os.dup2(stream, number)
                os.close(stream)
            _become_worker(**asked)
        for stream in streams:
            os.close(stream)
    os._exit(0)  # to take all modules down would be seconds


def _set(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _become_worker(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(folder)
    _set(environment)
    from ray._private.workers import setup_worker

    _, sys.argv = setup_worker.parser.parse_known_args(arguments)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def _ask() -> None:
    asked = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.environ[SOCKET])
        socket.send_fds(client, [b" "], list(STREAMS))
        client.sendall(json.dumps(asked).encode())


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        # Not the folder of this file, where `ray` is the tests of Ray.
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
        _serve(int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:])
    else:
        _ask()
