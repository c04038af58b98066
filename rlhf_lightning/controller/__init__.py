"""One controller, many workers: batches of futures, transfer protocols, worker groups and devices."""

from rlhf_lightning.garbage import at_rest

with at_rest():  # a device imports this first
    from rlhf_lightning.controller.batch import Batch
    from rlhf_lightning.controller.call import CallReport
    from rlhf_lightning.controller.errors import WorkerError, WorkerTimeoutError
    from rlhf_lightning.controller.futures import Gathered, Metrics, Value
    from rlhf_lightning.controller.groups import GROUPS, ORIGINS, check_neighbours, copies_of
    from rlhf_lightning.controller.parts import Parts
    from rlhf_lightning.controller.register import Caller, Remote, Worker, register
    from rlhf_lightning.controller.resource_pool import ResourcePool
    from rlhf_lightning.controller.transfer import (
        ALL_TO_ALL,
        BROADCAST,
        DP,
        DP_METRIC,
        MICRO_DP,
        ONE_TO_ALL,
        PP_ONLY,
        RANK_ZERO,
        Inputs,
        PartOf,
        RowTransfer,
        Transfer,
    )
    from rlhf_lightning.controller.worker_group import WorkerGroup

__all__ = [
    "ALL_TO_ALL",
    "BROADCAST",
    "DP",
    "DP_METRIC",
    "GROUPS",
    "MICRO_DP",
    "ONE_TO_ALL",
    "ORIGINS",
    "PP_ONLY",
    "RANK_ZERO",
    "Batch",
    "CallReport",
    "Caller",
    "Gathered",
    "Inputs",
    "Metrics",
    "PartOf",
    "Parts",
    "Remote",
    "ResourcePool",
    "RowTransfer",
    "Transfer",
    "Value",
    "Worker",
    "WorkerError",
    "WorkerGroup",
    "WorkerTimeoutError",
    "check_neighbours",
    "copies_of",
    "register",
]
