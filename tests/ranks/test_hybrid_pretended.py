"""The 3D-HybridEngine on pretended GPUs: what `tests/gpu/test_hybrid.py` asks of real ones."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.parallel import Generation, ParallelLayout
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
