"""Runs a function on the ranks of a gloo world: forks of this process, which has imported everything already.

test process ── fork ──> rank 0 .. rank d-1 (FileStore in a fresh directory, no port)
     │ waits for a result, a traceback or the death of each rank, or for the time-out
     └─ then kills what is left: no rank outlives `run`
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")


def run(
    world: int, function: Callable[Concatenate[dist.ProcessGroup, P], T], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """Call `function(group, ...)` on every rank, and return the results by rank.

    Raises:
        RuntimeError: a rank raised (its traceback is the message), died, or did not return within 60 seconds.
    """
    return run_within(60, world, lambda group: function(group, *args, **kwargs))


def run_within(timeout_s: float, world: int, function: Callable[[dist.ProcessGroup], T]) -> list[T]:
    """The same with another time-out."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        ranks, results = [], []
        for rank in range(world):
            receive, send = fork.Pipe(duplex=False)
            process = fork.Process(
                target=_rank, args=(function, rank, world, Path(directory) / "store", send)
            )
            process.start()
            send.close()
            ranks.append(process)
            results.append(receive)
        try:
            return _collect(results, time.monotonic() + timeout_s)
        finally:
            for process, receive in zip(ranks, results, strict=True):
                process.kill()
                process.join()
                process.close()
                receive.close()


def _collect(results: list[Connection], deadline: float) -> list[T]:
    values: dict[int, T] = {}
    while len(values) < len(results):
        waiting = {receive: rank for rank, receive in enumerate(results) if rank not in values}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(waiting.values())} have not returned within the time-out")
        for receive in ready:
            rank = waiting[receive]  # type: ignore[index]
            try:
                value, error = pickle.loads(results[rank].recv_bytes())  # noqa: S301 - our own fork wrote it
            except EOFError as err:
                raise RuntimeError(f"rank {rank} died without a word") from err
            if error:
                raise RuntimeError(f"rank {rank}:\n{error}")
            values[rank] = value
    return [values[rank] for rank in range(len(results))]


def _rank(
    function: Callable[[dist.ProcessGroup], T], rank: int, world: int, store: Path, send: Connection
) -> None:
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
        )
        group = dist.group.WORLD
        assert group is not None
        message = (function(group), "")
        dist.barrier()  # a rank that leaves early closes connections that others still read
        send.send_bytes(pickle.dumps(message))
    except BaseException:
        send.send_bytes(pickle.dumps((None, traceback.format_exc())))
        raise
    finally:
        send.close()
