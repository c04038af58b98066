"""The one torch.distributed world of a job, and the groups made once from its layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlhf_lightning.environment import defaults
from rlhf_lightning.parallel.groups import ModelGroups, all_ranks, meet
from rlhf_lightning.parallel.layout import Axis, ParallelLayout
from rlhf_lightning.parallel.link import Link

_NO_RECORD = {"TORCH_FR_BUFFER_SIZE": "0"}
"""Torch keeps 2,000 collectives, which NCCL's watchdog writes after a failure; nobody writes gloo's."""

NCCL_GRACE_S = 60
"""Seconds that NCCL waits longer than the controller: it ends the process, where that names the calls."""

LINK_PATIENCE = timedelta(days=365)
"""Longest wait over a link: that it lasts too long is for the controller to say, which sees calls end."""


@dataclass(frozen=True)
class WorldSpec:
    """What a device needs to join the world."""

    size: int
    """Devices of the job."""
    address: str
    """host:port at which device 0 listens."""
    groups: tuple[tuple[int, ...], ...]
    """Global ranks of every subgroup, in the order in which all devices make them."""
    timeout_s: float
    """Longest wait for a call, and in a collective; on GPUs a collective has NCCL_GRACE_S more."""
    links: tuple[tuple[int, ...], ...] = ()
    """Those of the groups that are links, whose other end may have any number of calls to finish first."""
    spans_nodes: bool = False
    """Whether the devices are on more than one node."""


def subgroups(layout: ParallelLayout, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """Global ranks of the groups of a layout on these devices, those of one rank left out."""
    axes: tuple[Axis, ...] = ("d", "t", "p")
    found = [tuple(devices[r] for r in group) for axis in axes for group in layout.groups(axis)]
    return [group for group in found if len(group) > 1]


@dataclass(frozen=True)
class Seat:
    """The place of one rank of a model: in its layout, on its device, in its process groups."""

    rank: int
    """Rank within the model's layout."""
    layout: ParallelLayout
    device: torch.device
    dp_group: dist.ProcessGroup | None
    """The data-parallel group of this rank; None where d = 1."""
    groups: ModelGroups | None
    """All groups of this rank; None for models in replicas only, for which the job makes just `dp_group`."""

    @property
    def gives_output(self) -> bool:
        """Whether this rank returns its replica's output: last stage, first tensor shard."""
        return self.rank in self.layout.output_ranks


@dataclass
class World:
    """A device's membership in the world."""

    rank: int
    device: torch.device
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    is_guest: bool = False
    """Whether the process was in a world of someone else's before, such as a script under torchrun."""

    @classmethod
    def join(cls, rank: int, spec: WorldSpec, *, gpu: bool) -> World:
        """Initialise torch.distributed and make every subgroup; one device without subgroups needs neither.

        Args:
            rank: global rank of this device.
            spec: the world.
            gpu: compute on the first visible GPU. Whether one is visible does not decide it: a process on a
                node with GPUs may see those that others have reserved.

        Raises:
            ValueError: subgroups are needed, and the process is in a world of someone else's.
        """
        world = cls(rank, torch.device("cuda", 0) if gpu else torch.device("cpu"))
        world.is_guest = dist.is_initialized()
        if world.is_guest and (spec.size > 1 or spec.groups):
            raise ValueError(
                "This process has a torch.distributed process group, and the engine needs one of its own. "
                "Call torch.distributed.destroy_process_group() first, or try --strategy colocated, whose "
                "devices are other processes."
            )
        try:
            world._begin(spec, gpu=gpu)
        except BaseException:
            world.leave()
            raise
        return world

    def _begin(self, spec: WorldSpec, *, gpu: bool) -> None:
        if gpu:
            torch.cuda.set_device(0)
        patience = timedelta(seconds=spec.timeout_s + gpu * NCCL_GRACE_S)
        if spec.size > 1 or spec.groups:
            where = {"init_method": f"tcp://{spec.address}"} if spec.size > 1 else {"store": HashStore()}
            with defaults({} if gpu else _NO_RECORD):
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if gpu else "gloo",
                    rank=self.rank,
                    world_size=spec.size,
                    timeout=patience,
                    **where,
                )
            # New groups do not inherit the world's timeout: the default is half an hour.
            patient = dict.fromkeys(spec.links, LINK_PATIENCE)
            self.groups = {
                ranks: dist.new_group(list(ranks), timeout=patient.get(ranks, patience))
                for ranks in spec.groups
            }
        if gpu:
            self.meet()

    def meet(self) -> None:
        """Let each group of this device and others `meet`, in the order in which all devices made them."""
        for ranks, group in self.groups.items():
            if self.rank in ranks and len(ranks) > 1:
                assert group is not None
                meet(group, self.device)

    def seat(self, layout: ParallelLayout, devices: Sequence[int]) -> Seat:
        """This device's seat in a model with a layout on these devices, given as global ranks."""
        rank = list(devices).index(self.rank)
        wanted = {ranks: self.groups.get(tuple(devices[r] for r in ranks)) for ranks in all_ranks(layout)}
        known = {ranks: group for ranks, group in wanted.items() if group is not None}
        groups = ModelGroups.create(layout, rank, known.__getitem__) if len(known) == len(wanted) else None
        data = next(tuple(devices[r] for r in ranks) for ranks in layout.groups("d") if rank in ranks)
        return Seat(rank, layout, self.device, self.groups[data] if layout.d > 1 else None, groups)

    def link(self, devices: Sequence[int]) -> Link | None:
        """This device's end of the link from the first of these devices to the others, if it has one."""
        group = self.groups.get(tuple(devices)) if self.rank in devices else None
        return None if group is None else Link(group, devices[0], self.device)

    def leave(self) -> None:
        """Leave the world, if this process is in one that is not someone else's."""
        if dist.is_initialized() and not self.is_guest:
            dist.destroy_process_group()
