"""Freed host memory stays with the process for a while."""

from __future__ import annotations

import resource

import torch

from rlhf_lightning.engines.host_memory import keep_freed_memory
from rlhf_lightning.engines.optimizer import STEPS_TO_TRIM, Counters
from rlhf_lightning.spec import OptimizerSpec
from tests.unit.parallel.memory import resident_bytes

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


def test_holes_in_the_heap_are_given_back_after_fifty_steps() -> None:
    keep_freed_memory()
    blocks = [torch.ones(2**18) for _ in range(64)]
    between = blocks[1::2]  # what is freed around them cannot join to one piece at the end of the heap
    del blocks
    counters, held = Counters(OptimizerSpec()), resident_bytes()
    for number in range(STEPS_TO_TRIM - 1):
        counters.count(1.0, stepped=number > 0)
    assert resident_bytes() > held - 2**22
    counters.count(1.0, stepped=True)
    assert resident_bytes() < held - 28 * 2**20
    assert len(between) == 32
