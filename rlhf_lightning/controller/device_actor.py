"""A device as a Ray actor: what it sees of its node, and how calls come to it."""

from __future__ import annotations

import gc
import os

import psutil
import ray
from torch._C._distributed_c10d import TCPStore

from rlhf_lightning.controller.block import Shard
from rlhf_lightning.controller.device import Device, Placement
from rlhf_lightning.controller.import_path import ImportPath
from rlhf_lightning.controller.parcel import answer, deliver
from rlhf_lightning.cores import usable_cores
from rlhf_lightning.parallel import WorldSpec

_LEFT = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Tells Ray to leave it to its actors which GPUs they see."""


class DeviceActor(Device):
    """A Device as a Ray actor."""

    def __init__(self, rank: int, *, gpu: bool, path: ImportPath | None = None) -> None:
        """See `Device`; it sees its own GPU alone, or none, also where Ray leaves that to others.

        Args:
            rank: among all devices.
            gpu: compute on a GPU.
            path: where the controller finds modules; those of a role or a function may be nowhere else.
        """
        gc.disable()  # until the first role is built: imports took a quarter longer
        if path is not None:
            path.take(own_first=bool(ray.get_runtime_context().runtime_env))
        if not gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries take what they see, and Ray hides no GPU
        elif os.environ.get(_LEFT, "0").lower() in ("1", "true"):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))
        super().__init__(rank, gpu=gpu)

    def join(self, spec: WorldSpec, num_threads: int, *, offload: bool = False) -> None:
        """See `Device`; on several nodes gloo takes the interface that other nodes reach this one by.

        By itself it takes the address of the host's name, which Debian's /etc/hosts maps to 127.0.1.1. Groups
        that are made later read the variable again, so it stays.
        """
        if spec.spans_nodes and (name := _interface(ray.util.get_node_ip_address())):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        super().join(spec, num_threads, offload=offload)

    def host(self, name: str, placement: Placement) -> None:
        """See `Device`; what has been imported until the first role is never looked at for garbage."""
        if not gc.isenabled():
            gc.freeze()
        try:
            super().host(name, placement)
        finally:
            gc.enable()

    def address(self) -> str:
        """host:port at which this device, the first, holds the world's store; a host of IPv6 is in brackets.

        It listens from now on, so that nobody takes the port meanwhile: `join` finds it by the number.
        """
        ip = ray.util.get_node_ip_address()
        host = f"[{ip}]" if ":" in ip else ip
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return f"{host}:{self.store.port}"

    def submit(self, parcel: bytes, *shards: Shard) -> bytes | Shard | tuple[bytes | Shard, ...]:
        """Run a call; Ray wants one result bare and several as a tuple.

        The report comes last: Ray stores one after the other, and what finds no room fails those behind it.
        """
        report, *columns = deliver(self, parcel, shards)
        return (*columns, report) if columns else report

    def ask(self) -> bytes:
        """Run the bare call that this task is named after."""
        return answer(self, str(ray.get_runtime_context().get_task_name()))

    def node_cores(self) -> tuple[str, int]:
        """Ray's name of the node, and the cores that this process may use there."""
        return str(ray.get_runtime_context().get_node_id()), usable_cores()

    def sees(self, directory: str) -> bool:
        """Whether a directory is there on this node."""
        return os.path.isdir(directory)

    def made_bytes(self, method: str) -> int:
        """Bytes of the columns that the last call of `role.method` made."""
        return self.made.get(method, 0)


def _interface(address: str) -> str | None:
    """The network interface of this machine that has an address; None where none has."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, has in interfaces if address in [each.address for each in has]), None)
