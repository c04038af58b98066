"""How parameters are cut over tensor ranks and stages: by hand, and there and back."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.parallel import Sharded, even_stages, holds
from rlhf_lightning.parallel.sharding import indivisible

COLUMN = Sharded("column", (8, 3), 0, 0)
ROW = Sharded("row", (3, 8), 0, 1)
FUSED = Sharded("gate and up", (16, 3), 0, 0, (8, 8))
UNEVEN = Sharded("uneven sections", (12, 2), 0, 0, (8, 4))
BIAS = Sharded("bias", (8,), 0, 0)
NORM = Sharded("norm", (5,), 0)
FUSED_ROW = Sharded("fused along its columns", (3, 12), 0, 1, (8, 4))
ALL = (COLUMN, ROW, FUSED, UNEVEN, BIAS, NORM, FUSED_ROW)


def values(param: Sharded) -> torch.Tensor:
    return torch.arange(float(param.numel)).view(param.shape)


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("param", ALL, ids=lambda param: param.name)
def test_shards_make_the_whole_again(param: Sharded, t: int) -> None:
    shards = [param.shard(values(param), t, index) for index in range(t)]
    assert all(shard.shape == param.shard_shape(t) for shard in shards)
    assert torch.equal(param.whole(shards), values(param))


def test_each_section_is_divided_by_itself() -> None:
    assert COLUMN.intervals(2, 1) == [(4, 8)]
    assert FUSED.intervals(2, 1) == [(4, 8), (12, 16)]
    assert UNEVEN.intervals(4, 3) == [(6, 8), (11, 12)]
    assert NORM.intervals(2, 1) == []
    assert torch.equal(FUSED.shard(values(FUSED), 4, 1), values(FUSED)[[2, 3, 10, 11]])
    assert torch.equal(ROW.shard(values(ROW), 4, 1), values(ROW)[:, 2:4])
    assert NORM.shard(values(NORM), 4, 1).shape == (5,)


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uneven sections: 4 along dimension 0 is not divisible by t=8"):
        UNEVEN.intervals(8, 0)


@pytest.mark.parametrize(
    ("t", "sizes", "reason"),
    [
        (4, (8, 4, 16, 64), ""),
        (4, (8, 1, 16, 64), ""),
        (2, (8, 1, 3, 64), ""),
        (3, (8, 2, 16, 63), "t does not divide the 8 attention heads"),
        (4, (8, 4, 16, 66), "t does not divide the 66 columns of the feed-forward layers"),
        (6, (12, 4, 16, 60), "t neither divides the 4 key-value heads nor is a multiple of them"),
        (4, (8, 1, 1, 64), "t does not divide the 10 rows of the fused query, key and value"),
    ],
)
def test_why_ranks_cannot_share_a_layer(t: int, sizes: tuple[int, int, int, int], reason: str) -> None:
    heads, groups, head_size, inner = sizes
    assert indivisible(t, heads=heads, groups=groups, head_size=head_size, inner=inner) == reason


@pytest.mark.parametrize(
    ("layers", "p", "chunks", "stages"),
    [
        (4, 2, 1, ((0, 1), (2, 3))),
        (5, 2, 1, ((0, 1, 2), (3, 4))),
        (7, 4, 1, ((0, 1), (2, 3), (4, 5), (6,))),
        (8, 2, 2, ((0, 1, 4, 5), (2, 3, 6, 7))),
        (5, 2, 2, ((0, 1, 3), (2, 4))),
    ],
)
def test_layers_are_divided_evenly_over_stages_and_chunks(
    layers: int, p: int, chunks: int, stages: tuple[tuple[int, ...], ...]
) -> None:
    assert even_stages(layers, p, chunks=chunks) == stages


@pytest.mark.parametrize(
    ("layers", "p", "chunks", "instead"),
    [
        (4, 5, 1, {"p": 4}),
        (9, 4, 3, {"p": 3}),
        (6, 3, 3, {"p": 2}),
        (6, 6, 4, {"chunks": 1}),
        (6, 2, 8, {"chunks": 3}),
        (6, 2, 4, {"chunks": 3}),
        (6, 9, 4, {"p": 6, "chunks": 1}),
    ],
)
def test_more_stages_than_layers_are_refused(
    layers: int, p: int, chunks: int, instead: dict[str, int]
) -> None:
    advice = ", ".join(f"{name}={number}" for name, number in instead.items())
    with pytest.raises(ValueError, match=rf"p={p} stages of {chunks} .* {layers} layers: .* Try {advice}\.$"):
        even_stages(layers, p, chunks=chunks)
    assert all(even_stages(layers, instead.get("p", p), chunks=instead.get("chunks", chunks)))


@pytest.mark.parametrize(
    ("place", "expected"), [(2, (False, True, False)), ("first", (True, False, False))], ids=str
)
def test_stages_that_hold_a_parameter(place: object, expected: tuple[bool, ...]) -> None:
    param = Sharded("it", (1,), place)  # type: ignore[arg-type]
    stages = ((0, 1), (2, 3), (4,))
    assert tuple(holds(param, stages, stage) for stage in range(3)) == expected


def test_stages_that_hold_the_ends() -> None:
    stages = ((0,), (1,), (2,))
    assert [holds(Sharded("tied", (1,), "ends"), stages, stage) for stage in range(3)] == [True, False, True]
    assert [holds(Sharded("head", (1,), "last"), stages, stage) for stage in range(3)] == [False, False, True]
    assert holds(Sharded("tied", (1,), "ends"), ((0, 1, 2),), 0)
