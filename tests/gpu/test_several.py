"""Engines over several ranks on GPUs learn and say what one CPU does; ranks that share a GPU too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines import FSDP, FSDPEngine
from rlhf_lightning.parallel import Link, ModelGroups, ParallelLayout
from rlhf_lightning.spec import ModelSpec
from tests.gpu import ranks
from tests.gpu.test_hybrid import SAME, said
from tests.unit.engines import tiny

PLACES = {
    "divided": (2, 1, FSDP()),
    "divided, gathered anew": (2, 1, FSDP(reshard_after_forward=True, defer_gradient_reduction=False)),
    "copies": (2, 1, FSDP(shard=1)),
    "tensor": (2, 2, FSDP(tensor=2)),
    "copies of divided": (4, 1, FSDP(shard=2)),
    "divided tensor": (4, 2, FSDP(tensor=2)),
}
"""Ranks, tensor ranks among them, and how."""
SHAPES = {"embedding": (500, 64), "norm": (64,), "scalar": ()}


def learned(device: torch.device, *, spec: ModelSpec, t: int, config: FSDP) -> dict[str, Tensor]:
    """What one rank says and becomes."""
    layout = ParallelLayout(t=t, d=dist.get_world_size() // t)
    groups, own = ModelGroups.create_all(layout), dist.get_rank() // t
    tiny.make_groups(config, layout)
    engine = FSDPEngine(spec, group=groups.data, tensor=groups.tensor, device=device, config=config)
    return said(engine, tiny.rows()[own :: layout.d], device)


@pytest.mark.parametrize("place", PLACES)
def test_an_engine_learns_and_says_what_one_cpu_does(place: str, tmp_path: Path) -> None:
    world, t, config = PLACES[place]
    spec = tiny.spec(tiny.write_causal(tmp_path))
    expected = said(FSDPEngine(spec), tiny.rows(), torch.device("cpu"))
    for found in ranks.run(world, partial(learned, spec=spec, t=t, config=config)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=SAME, rtol=0)


def weights(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for number, (name, shape) in enumerate(SHAPES.items(), start=1):  # fresh memory may hold 0
        yield name, torch.full(shape, float(number), device=device)


def linked(device: torch.device) -> dict[str, Tensor]:
    """What a rank has received from rank 1."""
    group = dist.new_group([*range(dist.get_world_size())])
    assert isinstance(group, dist.ProcessGroup)
    link = Link(group, 1, device)
    if dist.get_rank() == 1:
        link.send(weights(device), bucket_bytes=20_000)
        return dict(weights(device))
    return {name: value.clone() for name, value in link.receive()}


def test_a_link_carries_all_weights() -> None:
    for found in ranks.run(4, linked):
        for name, value in weights(torch.device("cpu")):
            assert torch.equal(found[name], value)
