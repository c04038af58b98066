"""A Ray cluster on this machine whose workers have imported what they need when they start."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.warm_workers import OPTIONS, SOCKET, warm

IMPORTED = (
    "transformers.models.llama.modeling_llama",
    "rlhf_lightning.engines.megatron.engine",
    "lightning.pytorch",
)
"""What a device needs for a tiny Llama, and what roles of tests do, but for what stands on Ray."""
NODE: dict[str, Any] = {"object_store_memory": 256 * 2**20, "include_dashboard": False, **OPTIONS}
"""What nodes have in common."""
PATIENT: dict[str, Any] = {"_system_config": {"worker_register_timeout_seconds": 300}}
"""A node's first workers come when all is imported, on a busy machine after the minute that Ray waits."""


@contextmanager
def started(
    *sizes: int, imported: tuple[str, ...] = IMPORTED, on_ray: tuple[str, ...] = ()
) -> Iterator[Cluster]:
    """Start a cluster, and connect this process to it.

    Its folder is not the one where Ray on this machine looks for running clusters.

    Args:
        sizes: CPUs of each node.
        imported: modules that do not import Ray.
        on_ray: others.
    """
    folder = tempfile.mkdtemp(prefix="ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        with warm(*imported, on_ray=on_ray) as socket:
            patch.setenv(SOCKET, socket)
            nodes = Cluster(initialize_head=True, head_node_args={**NODE, **PATIENT, "num_cpus": sizes[0]})
            for size in sizes[1:]:
                nodes.add_node(**NODE, num_cpus=size)
            ray.init(address=nodes.address, logging_level=logging.ERROR, log_to_driver=False)
            yield nodes
            ray.shutdown()
            nodes.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
