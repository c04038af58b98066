"""Runs a function on the ranks of a world, in processes that start anew: CUDA allows no forks.

As under Ray a rank sees its own GPU alone, and NCCL joins them. Where there are fewer GPUs than ranks, these
share them: NCCL refuses that, and gloo joins them, through the host. It sends nothing from one rank to one
other out of a GPU, and its gathering of lists of tensors, which DTensor calls for one, reads a GPU's memory
as the host's and ends the process (pytorch/pytorch issue 152645): here DTensor gathers as others do.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.multiprocessing.spawn import start_processes

Body = Callable[[torch.device], Mapping[str, Tensor]]
"""What a rank does on its device, and what is to come back."""


def num_gpus() -> int:
    """GPUs at hand."""
    return torch.cuda.device_count()


def run(world: int, body: Body) -> list[dict[str, Tensor]]:
    """Call `body`, a function of a module or a partial of one, on every rank; its tensors by rank."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            partial(_rank, world=world, gpus=num_gpus(), body=pickle.dumps(body), folder=folder), nprocs=world
        )
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(world)]


def _gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """The tensors of a group's ranks along dimension 0: `_c10d_functional.all_gather_into_tensor`."""
    every = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_single(every, tensor.contiguous(), group=_resolve_process_group(group))  # type: ignore[arg-type]
    return every


def _rank(rank: int, *, world: int, gpus: int, body: bytes, folder: str) -> None:
    seen, own = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), rank % max(1, gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[own] if len(seen) > own and seen[own] else str(own)
    # Only now: what the body imports may ask for GPUs, as DeepSpeed does, and CUDA then looks no more.
    compute: Body = pickle.loads(body)  # noqa: S301 - from the process that started this one
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shared = world > gpus
    backend = f"cpu:gloo,cuda:{'gloo' if shared else 'nccl'}" if device.type == "cuda" else "gloo"
    library = torch.library.Library("_c10d_functional", "IMPL")
    if shared:
        library.impl("all_gather_into_tensor", _gather, "CUDA")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.save({name: value.cpu() for name, value in compute(device).items()}, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()
