"""Weights over a link: every number once to every receiver, and no more than a bucket held on the way."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.parallel import Link, Moved, World, WorldSpec, link
from tests.unit import spmd
from tests.unit.parallel import memory

SHAPES = {"embedding": (500, 64), "norm": (64,), "proj": (64, 64), "last": (3, 5, 7), "scalar": ()}
NUMBERS = 500 * 64 + 64 + 64 * 64 + 105 + 1


def weights(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for number, (name, shape) in enumerate(SHAPES.items()):
        value = torch.empty(shape, dtype=dtype)
        yield name, value.copy_(torch.arange(value.numel()).view(shape) % 97 + number)


def sync(
    group: dist.ProcessGroup, *, source: int, bucket_bytes: int, dtype: torch.dtype
) -> tuple[Moved, int]:
    """What was moved, and what came over the wire; values are compared here."""
    end = Link(group, source, torch.device("cpu"))
    expected = dict(weights(dtype))
    dist.barrier()
    before = memory.received_bytes()
    if group.rank() == source:
        return end.send(weights(dtype), bucket_bytes=bucket_bytes), 0
    seen = []
    for name, value in end.receive():
        assert value.dtype == dtype
        assert torch.equal(value, expected[name]), name
        seen.append(name)
    assert seen == list(SHAPES)
    return Moved(), memory.received_bytes() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("source", "bucket_bytes"), [(0, 1), (2, 20_000), (1, 2**20)])
def test_every_receiver_has_all_weights_once(source: int, bucket_bytes: int, dtype: torch.dtype) -> None:
    found = spmd.run(3, sync, source=source, bucket_bytes=bucket_bytes, dtype=dtype)
    sent = NUMBERS * dtype.itemsize
    assert found[source][0].sent_bytes == 2 * sent
    largest = NUMBERS if bucket_bytes == 2**20 else 500 * 64
    assert found[source][0].bucket_bytes == largest * dtype.itemsize
    for rank, (_, wire) in enumerate(found):
        if rank != source:
            # gloo may let one receiver pass the numbers on; headers and notices are a few hundred bytes each.
            assert sent <= wire <= sent + 10_000


def held(group: dist.ProcessGroup) -> int:
    """The most that a rank holds of 20 tensors that travel two by two, each made when it is asked for."""
    gc.freeze()  # what the fork brought along does not count
    end, most = Link(group, 0, torch.device("cpu")), 0

    def many() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for number in range(20):
            most = max(most, memory.live_bytes())
            yield str(number), torch.full((200, 64), float(number))

    if group.rank() == 0:
        end.send(many(), bucket_bytes=2 * SIZE)
    else:
        for name, value in end.receive():
            assert bool((value == float(name)).all())
            most = max(most, memory.live_bytes())
    return most


SIZE = 200 * 64 * 4


def let_go(tensor: Tensor, source: int, *, group: dist.ProcessGroup, broadcast: Callable[..., None]) -> None:
    """Broadcast, and wait until gloo's thread, which may hold what it has sent a while, has let go of it."""
    size_bytes = tensor.untyped_storage().nbytes()

    def views() -> int:
        return sum(found.untyped_storage().nbytes() == size_bytes for found in memory.live_tensors())

    before, sent = views(), tensor.view(-1)
    broadcast(sent, source, group=group)
    del sent
    memory.settles(lambda: views() <= before)


def grown(group: dist.ProcessGroup) -> int:
    """The most that the source holds as a parameter comes that is larger than the buckets before it."""
    gc.freeze()
    end = Link(group, 0, torch.device("cpu"))
    growing = ((str(number), torch.zeros(number * 200, 64)) for number in (1, 1, 6, 1))
    waiting = partial(let_go, broadcast=dist.broadcast)
    with mock.patch.object(dist, "broadcast", waiting), memory.Peak(link) as peak:
        if group.rank() == 0:
            end.send(growing, bucket_bytes=4 * SIZE)
        else:
            for _ in end.receive():
                pass
    return peak.size_bytes


def test_a_larger_bucket_takes_the_place_of_a_smaller_one() -> None:
    sender, _ = spmd.run(2, grown)
    assert sender == (6 + 6) * SIZE  # the parameter and the bucket that it made grow


def test_a_bucket_is_all_that_is_held() -> None:
    sender, receiver = spmd.run(2, held)
    assert 2 * SIZE <= receiver < 3 * SIZE
    assert 2 * SIZE <= sender < 4 * SIZE


TIMEOUT_S, BUSY_S = 4.0, 6.0
"""How long a group of the world waits, and how long calls before it keep one end of a link."""


def late(group: dist.ProcessGroup, *, address: str, busy: int) -> list[str]:
    """What comes over a link of the world when one of its ends is there later than a group waits."""
    rank, ends, init = group.rank(), (0, 1), dist.init_process_group

    def patient(*given: str, **options: object) -> None:
        """Two forks on a busy machine may take longer than a group waits to be there."""
        init(*given, **options | {"timeout": timedelta(minutes=1)})  # type: ignore[arg-type]

    dist.destroy_process_group()
    spec = WorldSpec(size=2, address=address, groups=(ends,), timeout_s=TIMEOUT_S, links=(ends,))
    with mock.patch.object(dist, "init_process_group", patient):
        end = World.join(rank, spec, gpu=False).link(ends)
    assert end is not None
    if rank == busy:
        time.sleep(BUSY_S)
    if rank == 0:
        end.send(weights(torch.float32))
        return list(SHAPES)
    return [name for name, _ in end.receive()]


@pytest.mark.parametrize("busy", [0, 1])
def test_an_end_is_waited_for_while_it_has_other_calls_to_finish(busy: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert spmd.run(2, late, address=address, busy=busy) == [list(SHAPES)] * 2
