"""Workers of the tests' clusters fork from one process that has imported what a device imports.

Imports are most of what a device costs in a test: six or seven seconds of a core. Ray starts a worker with
`python SETUP_WORKER default_worker.py ...`. Here SETUP_WORKER is this file, which only sends its arguments,
environment and streams to the process of `warm`. That one forks, and the child becomes Ray's worker.
Tests that run a command in a process of its own, which starts Ray by itself, do without.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET = "RLHF_LIGHTNING_TEST_WARM_WORKERS"
"""Environment variable of a node: the path of the socket on which the process that forks listens."""
OPTIONS = {"setup_worker_path": __file__}
"""Of a node, beside `num_cpus` and the like."""
STREAMS = (0, 1, 2)


@contextmanager
def warm(*modules: str) -> Iterator[str]:
    """Let the workers of nodes with OPTIONS have imported these modules as they start; yields SOCKET.

    The process that forks ends with the block, or with this process.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path := os.path.join(folder, "socket"))
        listening.listen(64)
        command = [sys.executable, __file__, "serve", str(listening.fileno()), *modules]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listening.fileno()]) as server:
            try:
                yield path
            finally:
                assert server.stdin is not None
                server.stdin.close()


def _serve(listening: int, modules: list[str]) -> None:
    with socket.socket(fileno=listening) as server:
        for name in modules:
            __import__(name)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
        while server in select.select([server, sys.stdin], [], [])[0]:
            client, _ = server.accept()
            _fork(server, client)


def _fork(server: socket.socket, client: socket.socket) -> None:
    with client:
        _, streams, _, _ = socket.recv_fds(client, 1, len(STREAMS))
        with client.makefile("rb") as file:
            asked = json.load(file)
        if os.fork() == 0:
            server.close()
            client.close()
            for number, stream in zip(STREAMS, streams, strict=True):
                os.dup2(stream, number)
                os.close(stream)
            _become_worker(**asked)
        for stream in streams:
            os.close(stream)


def _become_worker(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    from ray._private.workers import setup_worker  # Ray reads its environment as it is imported

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
        _serve(int(sys.argv[2]), sys.argv[3:])
    else:
        _ask()
