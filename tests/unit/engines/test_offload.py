"""What is offloaded from a GPU lies packed in the host's memory, of which torch pins powers of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlhf_lightning.engines import offload
from rlhf_lightning.engines.offload import OffloadedParts, Parked, Part, storages
from tests.unit.pretended import GPU, pretended

KIB = 2**10
MIB = 2**20
RESIZE = torch.UntypedStorage.resize_


class Pinning(TorchFunctionMode):
    """Notes how many bytes torch was asked to pin each time, and fails as CUDA does without room."""

    def __init__(self, *, room: int = 2**40) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.room = room

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = kwargs or {}
        if given.get("pin_memory"):
            assert isinstance(args[0], int)
            self.asked.append(args[0])
            if sum(self.asked) > self.room:
                raise torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`.")
        return func(*args, **given)


def written(size: int, number: int) -> Tensor:
    """One of several storages on the GPU, whose parts differ."""
    found = torch.full((size,), number, dtype=torch.uint8, device=GPU)
    found[::KIB] = torch.arange(len(found[::KIB]), device=GPU) % 251
    return found


def _with_noise(storage: torch.UntypedStorage, size: int) -> None:
    """Make a storage larger, as a device does: with whatever was there before."""
    RESIZE(storage, size)
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(7)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ([33 * KIB] * 9, [256 * KIB, 41 * KIB]),
        ([300 * KIB], [256 * KIB, 44 * KIB]),
        ([2 * KIB] * 100, [200 * KIB]),
        ([4, 1030, 6], [512 + 1536 + 512]),
    ],
    ids=["shards", "larger than a block", "small ones", "odd ones"],
)
def test_many_shards_are_pinned_in_few_whole_blocks(
    sizes: list[int], blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_BLOCK", offload._BLOCK >> 10)  # of 256 KiB
    with pretended(), Pinning() as pinning:
        tensors = [written(size, number) for number, size in enumerate(sizes)]
        parts = OffloadedParts("model", device=GPU)
        parts.offload(["optimizer"], lambda _: tensors)
        assert pinning.asked == blocks
        held = parts._parts["optimizer"]
        assert isinstance(held, Parked)
        assert not any(piece.storage_offset() % 512 for _, host in held._parked for piece in host)
        assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
        assert parts.size_bytes == parts.memory(lambda _: [])["host"] == sum(sizes)
        parts.reload(["optimizer"])
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes
        for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
            assert torch.equal(tensor, written(size, number))
        assert parts.size_bytes == 0


def test_what_is_on_the_host_anyway_stays_and_counts_there() -> None:
    with pretended():
        there, here = written(KIB, 1), torch.zeros(3 * KIB, dtype=torch.uint8)
        parts = OffloadedParts("model", device=GPU)

        def tensors_of(part: Part) -> list[Tensor]:
            return [there, here] if part == "optimizer" else []

        held = {"parameters": 0, "gradients": 0, "optimizer": KIB, "host": 3 * KIB}
        assert parts.memory(tensors_of) == held
        parts.offload(["optimizer"], tensors_of)
        assert parts.memory(tensors_of) == held | {"optimizer": 0, "host": 4 * KIB}
        assert (parts.size_bytes, here.untyped_storage().nbytes()) == (KIB, 3 * KIB)
        parts.reload(["optimizer"])
        assert parts.memory(tensors_of) == held


def test_what_holds_zeros_is_freed_and_made_anew() -> None:
    with pretended():
        gradient = torch.zeros(KIB, device=GPU)
        parts = OffloadedParts("model", device=GPU)
        parts.offload(["gradients"], lambda _: [gradient], zeros=["gradients"])
        assert gradient.untyped_storage().nbytes() == parts.memory(lambda _: [gradient])["host"] == 0
        assert parts.size_bytes == 4 * KIB
        with mock.patch.object(torch.UntypedStorage, "resize_", _with_noise):
            parts.reload(["gradients"])
        assert torch.equal(gradient, torch.zeros(KIB, device=GPU))


def test_a_node_without_memory_to_pin_says_whose_and_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_BLOCK", 32 * MIB)
    with pretended(), Pinning(room=48 * MIB):
        tensors = [written(size, 1) for size in [32 * MIB] * 2]
        parts = OffloadedParts("org/model", device=GPU)
        with pytest.raises(RuntimeError) as failed:
            parts.offload(["optimizer"], lambda _: tensors)
    assert str(failed.value) == (
        "org/model: its optimizer (0.1 GiB) cannot wait in the memory of this node while another model "
        "computes: none is left to pin (CUDA error: out of memory). Leave --strategy.offload out, or take "
        "more nodes."
    )


def test_a_gpu_has_computed_what_leaves_it() -> None:
    """On whatever stream: once for all parts, before the first leaves."""
    seen: list[tuple[torch.device, int]] = []
    with pretended():
        there = [written(KIB, 1), written(KIB, 2)]
        with mock.patch(
            "torch.cuda.synchronize", lambda device: seen.append((device, offload.size_bytes(there)))
        ):
            OffloadedParts("model", device=GPU).offload(["parameters", "optimizer"], lambda _: there)
    assert seen == [(GPU, 2 * KIB)]


def test_storages_that_were_freed_are_left_alone() -> None:
    """As those of FSDP's whole parameters are between passes."""
    freed, there = torch.ones(3), torch.ones(2)
    freed.untyped_storage().resize_(0)
    assert [storage.nbytes() for storage in storages([freed, there, there[1:]])] == [8]
