"""A role without a model, which answers with what it was given."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from rlhf_lightning.controller import (
    ALL_TO_ALL,
    DP,
    DP_METRIC,
    ONE_TO_ALL,
    RANK_ZERO,
    Batch,
    Inputs,
    Remote,
    ResourcePool,
    RowTransfer,
    Worker,
    WorkerGroup,
    register,
)
from rlhf_lightning.controller.cluster import RayCluster
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.controller.ray_transport import RayTransport
from rlhf_lightning.controller.transfer import Outputs, RankInputs
from rlhf_lightning.parallel import ParallelLayout, subgroups


@dataclass(frozen=True)
class LastRank(RowTransfer):
    """A protocol of a user: all rows go to the last rank, the others are not called."""

    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        return {layout.num_ranks - 1: inputs}

    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Batch:
        return outputs[layout.num_ranks - 1].batch


def numbers(rows: int) -> Batch:
    """Rows of two numbers, all different."""
    return Batch.of({"x": torch.arange(2 * rows).view(rows, 2)})


class Echo(Remote):
    """Answers at once."""

    def __init__(self, group: WorkerGroup | None = None) -> None:
        self.group = group
        self.worker: Worker | None = None

    def caller(self) -> WorkerGroup | None:
        return self.group

    def build(self, worker: Worker) -> None:
        self.worker = worker

    @property
    def rank(self) -> int:
        assert self.worker is not None
        return self.worker.rank

    def seen(self, rows: TensorDict, *, by: int = 1) -> TensorDict:
        """`x` times a number, and the rank of this worker beside it."""
        found = {"x": rows["x"] * by, "rank": torch.full((len(rows),), self.rank)}
        return TensorDict(found, batch_size=rows.batch_size)

    @register(transfer=DP, reads=("x",), returns=("x", "rank"))
    def double(self, rows: TensorDict, *, by: int = 2) -> TensorDict:
        """`x` times a number, and who multiplied it."""
        return self.seen(rows, by=by)

    @register(transfer=DP, reads=("texts",), returns=("texts",))
    def same(self, rows: TensorDict) -> TensorDict:
        """Python objects, there and back."""
        return rows

    @register(transfer=LastRank(), reads=("x",), returns=("rank",))
    def last(self, rows: TensorDict) -> TensorDict:
        """Who was given the rows."""
        return TensorDict({"rank": torch.full((len(rows),), self.rank)}, batch_size=rows.batch_size)

    @register(transfer=DP_METRIC, reads=("x",))
    def total(self, rows: TensorDict) -> Mapping[str, float]:
        """Sum of this rank's `x`."""
        return {"total": float(rows["x"].sum())}

    @register(transfer=ONE_TO_ALL)
    def ping(self, *, number: int) -> int:
        """A number plus the rank."""
        return number + self.rank

    @register(transfer=ALL_TO_ALL)
    def each(self, *, number: int) -> int:
        """This rank's own number plus ten times the rank."""
        return number + 10 * self.rank

    @register(transfer=RANK_ZERO)
    def first(self, *, number: int) -> tuple[int, int]:
        """Who was asked."""
        return self.rank, number

    @register(transfer=ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(transfer=ONE_TO_ALL)
    def refuse(self) -> None:
        """Break on rank 2."""
        if self.rank == 2:
            raise ValueError("refused on purpose")

    @register(transfer=ONE_TO_ALL)
    def sleep(self, *, seconds: float) -> None:
        time.sleep(seconds)

    @register(transfer=DP, reads=("x",), returns=("x",))
    def fail(self, rows: TensorDict) -> TensorDict:
        """Break on rank 1."""
        if self.rank == 1:
            raise ValueError("broken on purpose")
        return rows

    @register(transfer=DP, reads=("x",), returns=("x",))
    def write(self, rows: TensorDict) -> TensorDict:
        """Change the input in place, through a view and without gradients."""
        with torch.inference_mode():
            rows["x"][:1].mul_(0)
        return rows


@contextmanager
def started(devices: int, kind: type[Echo] = Echo) -> Iterator[Echo]:
    """The role, or one of a class that extends it, on devices of its own."""
    cluster = RayCluster(None, timeout_s=120)
    transport = RayTransport(cluster, timeout_s=60)
    try:
        cluster.start([ResourcePool("main", devices, ("echo",))])
        layout, ranks = ParallelLayout(d=devices), tuple(range(devices))
        cluster.prepare({"echo": Placement(kind(), layout, ranks, None)}, subgroups(layout, ranks))
        yield kind(WorkerGroup("echo", transport, layout, ranks))
    finally:
        transport.close()


def transport_of(role: Echo) -> RayTransport:
    """How its calls travel."""
    assert role.group is not None
    assert isinstance(role.group.transport, RayTransport)
    return role.group.transport
