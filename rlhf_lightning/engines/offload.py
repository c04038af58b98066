"""Moves the memory of tensors to the host and back while every reference to the tensors stays valid."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlhf_lightning.engines.dtensor import local

Part = Literal["parameters", "gradients", "optimizer"]
"""A part of a model's state that can be offloaded."""
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")
_BLOCK = 1 << 28
"""Bytes that are pinned at once: torch rounds each request up to a power of two, and keeps it for good."""
_ALIGNED = 512
"""Bytes: what is moved begins at a multiple of these in its block, as it does on the device."""
TensorsOf = Callable[[Part], list[Tensor]]
"""Returns the tensors of a part of a model; those that are on the host anyway stay there."""


class OffloadedParts:
    """The offloaded parts of one model.

    On a CPU nothing moves, but using an offloaded part is refused all the same.
    """

    def __init__(self, path: str, *, device: torch.device) -> None:
        self._path, self._device = path, device
        self._parts: dict[Part, Parked | Freed] = {}
        self._learns = True
        self.frees = device.type != "cpu"
        """Whether memory moves."""

    def offload(self, parts: Iterable[Part], tensors_of: TensorsOf, *, zeros: Collection[Part] = ()) -> None:
        """Move parts to the host; those in `zeros` hold only zeros, and are freed and made anew instead.

        Raises:
            RuntimeError: the host has no memory for them.
        """
        if self._device.type == "cuda":  # whatever stream has used them
            torch.cuda.synchronize(self._device)
        for part in parts:
            if part not in self._parts:
                here = self._here(tensors_of(part)) if self.frees else []
                name = f"{self._path}: its {part}"
                self._parts[part] = Freed(here) if part in zeros else Parked(here, name=name)

    def reload(self, parts: Iterable[Part]) -> None:
        """Bring parts back to the device; those that are there stay as they are."""
        for part in parts:
            if part in self._parts:
                self._parts.pop(part).restore()

    def drop_gradients(self, tensors_of: TensorsOf) -> None:
        """Free the gradients for good, since the model does not learn."""
        for storage in storages(self._here(tensors_of("gradients"))):
            storage.resize_(0)
        self._learns = False

    def refuse(self, *parts: Part) -> None:
        """Refuse to use offloaded parts, and gradients that were dropped.

        Raises:
            RuntimeError: one of these parts is offloaded or dropped.
        """
        if "gradients" in parts and not self._learns:
            raise RuntimeError(
                f"{self._path}: the class of its role says trains=False, so there is no memory for "
                "gradients. Write trains: ClassVar[bool] = True there."
            )
        away = [part for part in parts if part in self._parts]
        if away:
            raise RuntimeError(f"{self._path}: {', '.join(away)} are offloaded. Call reload({away}) first.")

    @property
    def size_bytes(self) -> int:
        """Bytes that `reload` of all parts would bring back to the device."""
        return sum(held.brings_bytes for held in self._parts.values())

    def memory(self, tensors_of: TensorsOf) -> dict[str, int]:
        """See `TrainEngine.memory`."""
        sizes = dict.fromkeys((*PARTS, "host"), 0)
        for part in PARTS:
            every, held = tensors_of(part), self._parts.get(part)
            here = size_bytes(self._here(every))
            sizes["host"] += size_bytes(every) - here + (held.size_bytes if held else 0)
            sizes["host" if part in self._parts else part] += here
        return sizes

    def _here(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]


class Parked:
    """Storages whose bytes are on the host until `restore`.

    A storage resized to 0 frees its device memory, while tensors, views and optimizer state stay valid.
    Reading them before `restore` would read nothing, so their owner must refuse that. Copies from a GPU run
    beside the computation and later reloads; torch reuses the memory once they are done.

    Args:
        tensors: whole or sharded; views of one storage move together.
        name: what they are, which begins the error.

    Raises:
        RuntimeError: the host has no memory for them.
    """

    def __init__(self, tensors: Iterable[Tensor], *, name: str) -> None:
        found = storages(tensors)
        self._leaving = _Leaving(found[0].device) if found and found[0].is_cuda else None
        blocks = _Blocks([storage.nbytes() for storage in found], name=name, pinned=self._leaving is not None)
        self._parked = [(storage, self._moved(storage, blocks)) for storage in found]

    @property
    def size_bytes(self) -> int:
        """Bytes on the host."""
        return sum(len(piece) for _, host in self._parked for piece in host)

    @property
    def brings_bytes(self) -> int:
        """Bytes that `restore` takes on the device."""
        return self.size_bytes

    def restore(self) -> None:
        """Copy the bytes back."""
        if self._leaving is not None:
            self._leaving.wait()
        for storage, host in self._parked:
            sizes = [len(piece) for piece in host]
            storage.resize_(sum(sizes))
            for part, piece in zip(_bytes(storage).split(sizes), host, strict=True):
                part.copy_(piece, non_blocking=True)
        if self._leaving is not None:
            self._leaving.settle()

    def _moved(self, storage: torch.UntypedStorage, blocks: _Blocks) -> list[Tensor]:
        whole = _bytes(storage)
        host = blocks.take(len(whole))
        with nullcontext() if self._leaving is None else self._leaving.of(whole):
            for part, piece in zip(whole.split([len(piece) for piece in host]), host, strict=True):
                piece.copy_(part, non_blocking=True)
        storage.resize_(0)
        return host


class _Blocks:
    """Memory of the host for storages, one behind the other in few blocks, of which only the last is small.

    Args:
        sizes: bytes of all storages.
        name: what they are, which begins the error.
        pinned: whether their bytes come from a GPU.
    """

    def __init__(self, sizes: Sequence[int], *, name: str, pinned: bool) -> None:
        self._name, self._pinned, self._all = name, pinned, sum(sizes)
        self._left = sum(_aligned(size) for size in sizes)
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> list[Tensor]:
        """The next bytes, uint8, for the next storage: cut where a block ends.

        Raises:
            RuntimeError: the host has no memory for another block.
        """
        found = []
        while size:
            if not len(self._free):
                count = min(self._left, _BLOCK)
                self._free, self._left = self._block(count), self._left - count
            piece = self._free[:size]
            found.append(piece)
            size, self._free = size - len(piece), self._free[_aligned(len(piece)) :]
        return found

    def _block(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as err:
            raise RuntimeError(
                f"{self._name} ({self._all / 2**30:.1f} GiB) cannot wait in the memory of this node while "
                f"another model computes: none is left to pin ({str(err).partition(chr(10))[0]}). Leave "
                "--strategy.offload out, or take more nodes."
            ) from err


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class _Leaving:
    """A stream for copies from a GPU to the host, beside its computation.

    Args:
        device: the GPU, whose work so far is done.
    """

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    """One stream per device, for all that leaves it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._stream = self._streams[device]

    @contextmanager
    def of(self, tensor: Tensor) -> Iterator[None]:
        """Copy a tensor within this context; torch keeps its memory until the copy is done."""
        with torch.cuda.stream(self._stream):
            yield
        tensor.record_stream(self._stream)
        self._sent = self._stream.record_event()

    def wait(self) -> None:
        """Let the computation's next work begin only when all copies have arrived."""
        torch.cuda.current_stream(self._device).wait_event(self._sent)

    def settle(self) -> None:
        """Wait until the computation's stream is idle, so that any stream may read its results."""
        torch.cuda.current_stream(self._device).synchronize()


class Freed:
    """Tensors of zeros without memory until `restore`; as `Parked`, with nothing on the host.

    Args:
        tensors: views of one storage are freed together.
    """

    size_bytes = 0
    """Bytes on the host."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._freed = [(storage, storage.nbytes()) for storage in storages(tensors)]
        for storage, _ in self._freed:
            storage.resize_(0)

    @property
    def brings_bytes(self) -> int:
        """See `Parked.brings_bytes`."""
        return sum(size for _, size in self._freed)

    def restore(self) -> None:
        """Make them again."""
        for storage, size in self._freed:
            storage.resize_(size)
            _bytes(storage).zero_()


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind the tensors that have memory, each once."""
    found = (local(tensor.detach()).untyped_storage() for tensor in tensors)
    return list({storage.data_ptr(): storage for storage in found if storage.nbytes()}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes behind the tensors, what they share counted once."""
    return sum(storage.nbytes() for storage in storages(tensors))
