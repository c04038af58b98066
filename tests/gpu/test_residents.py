"""Models that make room for each other on a GPU: what its allocator says, and what stays the same."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlhf_lightning.controller.device import Device
from rlhf_lightning.controller.residents import GPUGauge
from rlhf_lightning.spec import LoRA
from tests.unit.engines import tiny
from tests.unit.workers.rooms import MODEL_BYTES, Job

SAME = 1e-4
MEBI = 1 << 20


class Small(GPUGauge):
    """A GPU with room for none of the models beside another."""

    def __init__(self, _device: Device) -> None:
        super().__init__()

    def free_bytes(self) -> int:
        return MODEL_BYTES - torch.cuda.memory_allocated()


class Whole(GPUGauge):
    """All of it."""

    def __init__(self, _device: Device) -> None:
        super().__init__()


def test_the_gauge_tells_what_is_free_and_what_was_taken(gpu: torch.device) -> None:
    gauge = GPUGauge()
    torch.ones(1, device=gpu)
    before = gauge.free_bytes()
    held = torch.ones(64 * MEBI, device=gpu)
    assert before - gauge.free_bytes() >= held.nbytes
    gauge.begin()
    torch.ones(32 * MEBI, device=gpu)
    assert 128 * MEBI <= gauge.taken_bytes() < 140 * MEBI
    assert gauge.highest_bytes() >= 384 * MEBI
    del held
    gauge.begin()
    assert gauge.taken_bytes() == 0
    assert gauge.highest_bytes() >= 384 * MEBI
    assert before - gauge.free_bytes() < 32 * MEBI  # what torch keeps counts as free


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "adapters"])
@pytest.mark.parametrize("gauge", [None, Small, Whole])
def test_numbers_do_not_depend_on_the_room(
    gpu: torch.device, tmp_path: Path, lora: LoRA | None, gauge: type[Small | Whole] | None
) -> None:
    model = tiny.write_causal(tmp_path)
    with closing(Job(model, lora, gauge=None, offload=False, device=gpu)) as job:
        expected = job.run()
    with closing(Job(model, lora, gauge=gauge, device=gpu)) as job:
        for found, same in zip(job.run(), expected, strict=True):
            torch.testing.assert_close(found, same, atol=SAME, rtol=0)
        job.came.clear()
        job.iteration()
        assert (not job.came) == (gauge is Whole)
