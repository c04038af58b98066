"""The ranks over which FSDP shards a model: all of a group, or parts of it that hold copies.

group of 4 ranks, shard=2      copies     0 1      each row divides one copy of the weights,
                                          2 3      each column adds its gradients up
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def shard_mesh(group: dist.ProcessGroup, shard: int, *, device_type: str) -> DeviceMesh:
    """One axis over the group, or two, copies and shards; all ranks of the group call it.

    Args:
        group: ranks that train a model together.
        shard: neighbours that divide a copy; 0 for all of them.
        device_type: of the ranks' devices.
    """
    if shard in (0, dist.get_world_size(group)):
        return DeviceMesh.from_group(group, device_type)
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, shard)
    me = dist.get_rank()
    # Only members make these groups, so that no rank outside has to know of them.
    mine = [
        dist.new_group(line.tolist(), use_local_synchronization=True)
        for line in (*ranks.T, *ranks)
        if me in line
    ]
    return DeviceMesh.from_group(mine, device_type, mesh=ranks, mesh_dim_names=("copy", "shard"))
