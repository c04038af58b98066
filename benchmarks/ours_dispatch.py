"""Our WorkerGroup: a DP echo chained through Batch columns, and a ONE_TO_ALL ping."""

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from exchange import Exchange, Timing
from tensordict import TensorDict
from turns import turns

from rlhf_lightning.controller import (
    DP,
    ONE_TO_ALL,
    Batch,
    Remote,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
)
from rlhf_lightning.controller.cluster import RayCluster
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.controller.ray_transport import RayTransport
from rlhf_lightning.garbage import collect_rarely
from rlhf_lightning.parallel import ParallelLayout, subgroups

COLUMNS = tuple(f"column_{index}" for index in range(Exchange.columns))


class Echo(Remote):
    """A role that returns what it gets."""

    def __init__(self, group: WorkerGroup | None = None) -> None:
        self.group = group
        self.rank = 0

    def caller(self) -> WorkerGroup | None:
        """Where calls go."""
        return self.group

    def build(self, worker: Worker) -> None:
        """Remember the rank."""
        self.rank = worker.rank

    @register(transfer=DP, reads=COLUMNS, returns=COLUMNS)
    def echo(self, rows: TensorDict) -> TensorDict:
        """Return the rows of this rank."""
        return rows

    @register(transfer=ONE_TO_ALL)
    def ping(self) -> int:
        """Return the rank."""
        return self.rank


@contextmanager
def started(workers: int) -> Iterator[tuple[Echo, RayTransport]]:
    """The role on `workers` devices of this machine."""
    cluster = RayCluster(None, timeout_s=600)
    transport = RayTransport(cluster, timeout_s=600)
    try:
        cluster.start([ResourcePool("main", workers, ("echo",))])
        layout, ranks = ParallelLayout(d=workers), tuple(range(workers))
        cluster.prepare({"echo": Placement(Echo(), layout, ranks, None)}, subgroups(layout, ranks))
        collect_rarely()  # as a strategy does before a run
        yield Echo(WorkerGroup("echo", transport, layout, ranks)), transport
    finally:
        transport.close()


def echo_s(role: Echo, transport: RayTransport, exchange: Exchange) -> float:
    """Seconds of one of `exchange.calls` chained echoes."""
    batch = role.echo(_batch(exchange))
    transport.drain()
    start = time.perf_counter()
    for _ in range(exchange.calls):
        batch = role.echo(batch)
    transport.drain()
    return (time.perf_counter() - start) / exchange.calls


def ping_s(role: Echo, *, calls: int) -> float:
    """Seconds of a ping, the median of all but the first tenth."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        role.ping().fetch()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[calls // 10 :])


def measure(exchange: Exchange) -> Timing:
    """Start `exchange.workers` workers on this machine, measure, stop them.

    An echo reaches the worker's method as tensors, and what it returns is stored as a new output, so that
    both systems store the same bytes. A chain ends when the last call has ended; nothing is fetched.
    """
    pings: list[float] = []
    echoes: list[float] = []
    with started(exchange.workers) as (role, transport):
        for _ in turns(exchange.turns):
            pings.append(ping_s(role, calls=exchange.pings))
            echoes.append(echo_s(role, transport, exchange))
    return Timing(echo_s={"chained": echoes}, ping_s=pings)


def _batch(exchange: Exchange) -> Batch:
    """`columns` int64 columns of [rows, width]."""
    values = torch.arange(exchange.rows * exchange.width).view(exchange.rows, exchange.width)
    return Batch.of({name: values + index for index, name in enumerate(COLUMNS)})


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(Exchange()))))
