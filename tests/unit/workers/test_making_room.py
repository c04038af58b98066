"""Models that make room for each other: their bytes come and go, and every number stays what it was."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from rlhf_lightning.spec import LoRA
from tests.unit.engines import tiny
from tests.unit.workers.rooms import MODEL_BYTES, Held, Job


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_causal(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "adapters"])
@pytest.mark.parametrize("models", [None, 4, 100])
def test_numbers_do_not_depend_on_the_room(model: Path, lora: LoRA | None, models: int | None) -> None:
    """A device for one, for some, and for all: with its moments a model is three, and what it learns four."""
    size = 0 if models is None else models * MODEL_BYTES
    with closing(Job(model, lora, gauge=None, offload=False)) as job:
        expected = job.run()
        assert job.moves == 0
    with closing(Job(model, lora, gauge=partial(Held, size=size) if size else None)) as job:
        found = job.run()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert not isinstance(job.gauge, Held) or job.gauge.most <= size
        job.moves = 0
        job.iteration()
        assert (job.moves == 0) == (models == 100)
