"""The 3D-HybridEngine on pretended GPUs: what `tests/gpu/test_hybrid.py` asks of real ones."""

from __future__ import annotations

from math import prod
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines import FSDPEngine, Megatron
from rlhf_lightning.engines.megatron.engine import MegatronEngine
from rlhf_lightning.parallel import Generation, ModelGroups, ParallelLayout, Seat
from rlhf_lightning.spec import ModelSpec
from tests.gpu.test_hybrid import PAIRS, on_rank, said
from tests.unit import spmd
from tests.unit.engines import tiny
from tests.unit.pretended import GPU, pretended

SAME, RANKS = 1e-5, 4


def on_pretended(group: dist.ProcessGroup, spec: ModelSpec, layout: ParallelLayout) -> dict[str, Tensor]:
    """What a rank says; all are GPU 0 of machines of their own."""
    del group
    with pretended():
        return on_rank(GPU, spec=spec, layout=layout)


@pytest.mark.parametrize(("train", "generate"), [pair for pair in PAIRS if prod(pair[0]) <= RANKS], ids=str)
def test_every_layout_learns_and_says_what_one_cpu_does(
    train: tuple[int, int, int], generate: tuple[int, int], tmp_path: Path
) -> None:
    layout = ParallelLayout(*train, generation=Generation(*generate))
    spec = tiny.spec(tiny.write_causal(tmp_path), eps=1e-4)
    expected = said(FSDPEngine(spec), tiny.rows(), torch.device("cpu"))
    for found in spmd.run(layout.num_ranks, on_pretended, spec, layout):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=SAME, rtol=0, msg=name)


def stepped(group: dist.ProcessGroup, spec: ModelSpec) -> int:
    """How often a step makes the roots of all second moments at once."""
    del group
    with pretended(), mock.patch("torch._foreach_sqrt", wraps=torch._foreach_sqrt) as roots:
        layout = ParallelLayout()
        seat = Seat(0, layout, GPU, None, ModelGroups.create_all(layout))
        engine = MegatronEngine(spec, head="lm", seat=seat, config=Megatron())
        engine.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
        assert engine.optimizer_step()["skipped_steps"] == 0
        return roots.call_count


def test_a_step_on_a_gpu_takes_no_copy_of_the_moments(tmp_path: Path) -> None:
    """Torch would choose that on a GPU: 4 bytes a parameter, which no table of memory has."""
    assert spmd.run(1, stepped, tiny.spec(tiny.write_causal(tmp_path))) == [0]
