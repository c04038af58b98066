"""A description of the present machine, chosen among the known ones without measuring."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlhf_lightning.mapping import hardware
from rlhf_lightning.mapping.hardware import Hardware

if TYPE_CHECKING:
    from rlhf_lightning.controller.room import NodeGPUs


def this_machine(devices: int) -> Hardware:
    """The known description that fits this machine best, with its own number and memory of GPUs.

    `rlhf calibrate` measures a better one.

    Args:
        devices: how many share the machine's memory where it has no GPU.

    Raises:
        ValueError: the GPU is of an unknown kind.
    """
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name().lower()
        found = [h for name, h in hardware.KNOWN.items() if name.partition("-")[0] in gpu]
        if not found:
            raise ValueError(
                f"hardware: no description of {gpu!r} is known. Measure one with `rlhf calibrate FILE`, and "
                "give that file where hardware is asked for."
            )
        own = torch.cuda.get_device_properties(0).total_memory
        return dataclasses.replace(found[0], memory_bytes=float(own), gpus_per_node=torch.cuda.device_count())
    return dataclasses.replace(hardware.CPU, gpus_per_node=devices, memory_bytes=host_memory() / devices)


def of_a_run(named: str, devices: int, *, option: str) -> Hardware:
    """The hardware of a run: what is named, or else this machine.

    Its nodes are the largest of the cluster that is connected which have so many devices together: tensor
    shards stay inside, so a node counts with what divides the GPUs of each.

    Args:
        named: a known name, a file, or empty.
        devices: of the run.
        option: what names it, for messages.

    Raises:
        ValueError: nothing is named, and the GPUs are of an unknown kind, of several, or not on this machine.
    """
    from rlhf_lightning.controller.room import gpus_by_node  # noqa: PLC0415

    nodes = gpus_by_node()
    found = hardware.load(named) if named else _unnamed(devices, nodes, option=option)
    counts = sorted((node.count for node in nodes), reverse=True)
    used = next((n for n in range(1, len(counts)) if sum(counts[:n]) >= devices), len(counts))
    return dataclasses.replace(found, gpus_per_node=math.gcd(*counts[:used]) or found.gpus_per_node)


def _unnamed(devices: int, nodes: Sequence[NodeGPUs], *, option: str) -> Hardware:
    """This machine, where the GPUs of the cluster are like its own.

    Raises:
        ValueError: it gives the cluster none, or the nodes have several kinds.
    """
    from rlhf_lightning.controller.cluster import num_gpus  # noqa: PLC0415

    known = f"{', '.join(hardware.KNOWN)}, or a file of `rlhf calibrate`"
    elsewhere = bool(nodes) and not any(node.here for node in nodes)  # whatever GPU a login node has
    if num_gpus() and (elsewhere or not torch.cuda.is_available()):
        raise ValueError(
            f"{option}: the cluster has {num_gpus()} GPUs, and this process sees none of them. Say of which "
            f"kind they are: {known}."
        )
    hosts = {node.kind: node.host for node in nodes if node.kind}
    if len(hosts) > 1:
        every = ", ".join(f"{kind} on {host}" for kind, host in hosts.items())
        raise ValueError(
            f"{option}: the cluster has GPUs of several kinds, {every}, and a run cannot ask for one. Say "
            f"which to count on, such as that with the least memory: {known}."
        )
    return this_machine(devices)


def host_memory() -> float:
    """Bytes of the machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
