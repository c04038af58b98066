"""Runs a function on the ranks of a world, in processes that start anew: CUDA allows no forks.

As under Ray a rank sees its own GPU alone, and NCCL joins them. Where there are fewer GPUs than ranks, these
share them, which NCCL allows from 2.30 on if it is told to. Before it gloo joins them, through the host. It
sends nothing from one rank to one other out of a GPU, and its gathering of lists of tensors, which DTensor
calls for one, reads a GPU's memory as the host's and ends the process (pytorch/pytorch issue 152645): here
DTensor gathers as others do.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.multiprocessing.spawn import start_processes

Body = Callable[[torch.device], Mapping[str, Tensor]]
"""What a rank does on its device, and what is to come back."""


SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
"""What NCCL reads: ranks may share a GPU, no switch between GPUs adds up, and each takes few blocks."""


def num_gpus() -> int:
    """GPUs at hand."""
    return torch.cuda.device_count()


def nccl_version() -> int:
    """Of the library that is loaded, which need not be that of torch's build: 23007 is 2.30.7, 0 is none."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def by_nccl(world: int) -> bool:
    """Whether NCCL can join that many ranks."""
    return num_gpus() >= world or (num_gpus() > 0 and nccl_version() >= 23000)


def need(world: int) -> None:
    """Skip where NCCL cannot join that many ranks."""
    if not by_nccl(world):
        pytest.skip(f"needs {world} GPUs, or NCCL 2.30: here are {num_gpus()}, and NCCL {nccl_version()}")


class Job(NamedTuple):
    """What the ranks are told."""

    world: int
    gpus: int
    nccl: bool
    body: bytes
    folder: str


def run(world: int, body: Body) -> list[dict[str, Tensor]]:
    """Call `body`, a function of a module or a partial of one, on every rank; its tensors by rank."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            _rank, args=(Job(world, num_gpus(), by_nccl(world), pickle.dumps(body), folder),), nprocs=world
        )
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(world)]


def _gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """The tensors of a group's ranks along dimension 0: `_c10d_functional.all_gather_into_tensor`."""
    every = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_single(every, tensor.contiguous(), group=_resolve_process_group(group))  # type: ignore[arg-type]
    return every


def _rank(rank: int, job: Job) -> None:
    seen, own = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), rank % max(1, job.gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[own] if len(seen) > own and seen[own] else str(own)
    # Only now: what the body imports may ask for GPUs, as DeepSpeed does, and CUDA then looks no more.
    compute: Body = pickle.loads(job.body)  # noqa: S301 - from the process that started this one
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if job.nccl and job.world > job.gpus:
        os.environ |= SHARED
    backend = f"cpu:gloo,cuda:{'nccl' if job.nccl else 'gloo'}" if device.type == "cuda" else "gloo"
    library = torch.library.Library("_c10d_functional", "IMPL")
    if not job.nccl:
        library.impl("all_gather_into_tensor", _gather, "CUDA")
    dist.init_process_group(
        backend, init_method=f"file://{job.folder}/store", rank=rank, world_size=job.world
    )
    torch.save({name: value.cpu() for name, value in compute(device).items()}, Path(job.folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()
