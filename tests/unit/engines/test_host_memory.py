"""Freed host memory stays with the process."""

from __future__ import annotations

import resource

import torch

from rlhf_lightning.engines.host_memory import keep_freed_memory

PAGES = 64 * 2**20 // resource.getpagesize()


def faults_of_a_tensor() -> int:
    """Pages that the system maps for a tensor of 64 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_large_tensors_come_to_reuse_each_other() -> None:
    keep_freed_memory()
    # Not at once: an aligned block asks for a little more than the one before it has left.
    assert min(faults_of_a_tensor() for _ in range(20)) < PAGES / 100
