"""Calls on a Ray of its own, whose object store is as small as Ray makes it and must not spill to disk.

Run as `python -m tests.ray.crammed`, it writes a line of JSON for each case: name, error, seconds.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping

import ray
import torch
from tensordict import TensorDict

from rlhf_lightning.controller import DP, Batch, ResourcePool, WorkerError, WorkerGroup, register
from rlhf_lightning.controller.cluster import RayCluster
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.controller.ray_transport import RayTransport
from rlhf_lightning.parallel import ParallelLayout
from tests.ray.echo import Echo

MIB = 2**20
STORE_MIB = 80
FREE_S = 10.0


class Large(Echo):
    """Answers with more than it was given."""

    @register(transfer=DP, reads=("x",), returns=("x",))
    def grown(self, rows: TensorDict, *, mib: int) -> TensorDict:
        """So many MiB a row."""
        return TensorDict({"x": torch.ones(len(rows), mib * MIB // 4)}, batch_size=rows.batch_size)


def rows(mib: int) -> Batch:
    """One row of so many MiB, or of one number."""
    return Batch.of({"x": torch.ones(1, max(1, mib * MIB // 4))})


def one_result(role: Large) -> Batch:
    """More than the store has."""
    return role.grown(rows(0), mib=100)


def results_together(role: Large) -> Batch:
    """Three that fit one by one, and a call that reads the last."""
    return Batch.joined(
        [role.grown(rows(0), mib=30), role.grown(rows(0), mib=30), role.double(one_more(role))]
    )


def one_more(role: Large) -> Batch:
    """The third."""
    return role.grown(rows(0), mib=31)


def given(role: Large) -> Batch:
    """The controller's own column."""
    return role.double(rows(100))


def afterwards(role: Large) -> Batch:
    """What fits once the others' columns are freed, which Ray does in its own time."""
    return role.double(rows(10))


CASES: Mapping[str, Callable[[Large], Batch]] = {
    function.__name__: function for function in (one_result, results_together, given, afterwards)
}


def error_of(case: Callable[[Large], Batch], role: Large, transport: RayTransport) -> str:
    """What a case ends with; empty: it went well."""
    try:
        kept = case(role)
        transport.drain()
        del kept
    except WorkerError as err:
        return str(err)
    return ""


def main() -> None:
    """Run every case on the same device."""
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=STORE_MIB * MIB,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _system_config={"local_fs_capacity_threshold": 0.0},
    )
    cluster = RayCluster(None, timeout_s=120)
    cluster.start([ResourcePool("main", 1, ("large",))])
    cluster.prepare({"large": Placement(Large(), ParallelLayout(), (0,), None)}, [])
    transport = RayTransport(cluster, timeout_s=60)
    role = Large(WorkerGroup("large", transport, ParallelLayout(), (0,)))
    for name, case in CASES.items():
        began = time.monotonic()
        error = error_of(case, role, transport)
        while error and case is afterwards and time.monotonic() - began < FREE_S:
            error = error_of(case, role, transport)
        sys.stdout.write(json.dumps([name, error, time.monotonic() - began]) + "\n")
    transport.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
