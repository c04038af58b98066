"""Runs a function on the ranks of a world, in processes that start anew: CUDA allows no forks.

As under Ray a rank sees its own GPU alone, and NCCL joins them. Where there are fewer GPUs than ranks, these
share them: NCCL refuses that, and gloo joins them, through the host. It sends nothing from one rank to one
other out of a GPU.
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
from torch.multiprocessing.spawn import start_processes

Body = Callable[[torch.device], Mapping[str, torch.Tensor]]
"""What a rank does on its device, and what is to come back."""


def num_gpus() -> int:
    """GPUs at hand."""
    return torch.cuda.device_count()


def run(world: int, body: Body) -> list[dict[str, torch.Tensor]]:
    """Call `body`, a function of a module or a partial of one, on every rank; its tensors by rank."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            partial(_rank, world=world, gpus=num_gpus(), body=pickle.dumps(body), folder=folder), nprocs=world
        )
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(world)]


def _rank(rank: int, *, world: int, gpus: int, body: bytes, folder: str) -> None:
    seen, own = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), rank % max(1, gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[own] if len(seen) > own and seen[own] else str(own)
    # Only now: what the body imports may ask for GPUs, as DeepSpeed does, and CUDA then looks no more.
    compute: Body = pickle.loads(body)  # noqa: S301 - from the process that started this one
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = f"cpu:gloo,cuda:{'nccl' if world <= gpus else 'gloo'}" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.save({name: value.cpu() for name, value in compute(device).items()}, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()
