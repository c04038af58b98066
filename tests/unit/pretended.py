"""A GPU that is not there: tensors remember the device they were made for, and refuse to meet others.

    with pretended():
        engine = FSDPEngine(spec, device=GPU)       computes here, as a GPU's rules allow

A storage is marked where its tensors are said to be on the GPU, or on the CPU, and has no mark where nobody
said it: what a backward pass makes. The numbers are real, and the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import ClassVar
from unittest import mock
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import _allowed_determinism_checks_to_fns

GPU = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_ANSWERS = {
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")),
    **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), 0),
    "is_available": True,
    "current_device": 0,
    "mem_get_info": (1 << 34, 1 << 34),
    "get_device_capability": (7, 0),  # without flash attention, which a CPU does not compute
}
"""What functions of `torch.cuda` say."""
_FIELDS = vars(torch._C.TensorBase)
_ANYWHERE = {torch._has_compatible_shallow_copy_type, _FIELDS["data"].__set__, Tensor.copy_}
"""Take tensors of several devices."""
_INDEXED = {torch.index_put, Tensor.index_put_}
"""Take indices of the CPU; so does `[...]`."""
_PROPERTIES: dict[object, Callable[[Tensor], object]] = {
    _FIELDS["is_cuda"].__get__: lambda tensor: mark_of(tensor) == "cuda",
    _FIELDS["is_cpu"].__get__: lambda tensor: mark_of(tensor) != "cuda",
}


def mark_of(tensor: Tensor) -> str | None:
    """Where a tensor is said to be: `cuda`, `cpu`, or None."""
    with torch._C.DisableTorchFunction():
        mark: str | None = getattr(tensor.untyped_storage(), "pretended", None)
    return mark


def _is_there(storage: torch.UntypedStorage) -> bool:
    return getattr(storage, "pretended", None) == "cuda"


def mark(found: object, kind: str | None) -> None:
    """Say where the tensors in a result are, of which nobody has said it."""
    for tensor in _tensors(found):
        if kind is not None and mark_of(tensor) is None:
            with torch._C.DisableTorchFunction():
                tensor.untyped_storage().pretended = kind  # type: ignore[attr-defined]


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided and type(value) is not torch.nn.parameter.UninitializedParameter:
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)


class Stream:
    """One in whose turn all is done at once; `told` notes what it and its like were asked."""

    told: ClassVar[list[str]] = []

    def __init__(self, device: object = None) -> None:
        del device

    def record_event(self) -> Stream:
        """Itself, which is never late."""
        self.told.append("record_event")
        return self

    def wait_event(self, _: Stream) -> None:
        self.told.append("wait_event")

    def synchronize(self) -> None:
        self.told.append("synchronize")


def _record_stream(_: Tensor, stream: Stream) -> None:
    stream.told.append("record_stream")


def _recorded(_: object, compute: partial[Tensor | None]) -> Callable[[], Tensor | None]:
    step = WeakMethod(compute.func)  # a graph keeps memory, not whoever computed in it
    outputs: list[Tensor | None] = []
    arguments = compute.args

    def replay() -> Tensor | None:
        alive = step()
        assert alive is not None
        found: Tensor | None = alive(*arguments)
        if not outputs:
            outputs.append(found)
        elif outputs[0] is not None and found is not None:
            outputs[0].copy_(found)
        return outputs[0]

    return replay


class _Pretending(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Tensor):
            if func == _FIELDS["device"].__get__ and mark_of(first) == "cuda":
                return GPU
            if func in _PROPERTIES:
                return _PROPERTIES[func](first)
            if func is Tensor.numpy and mark_of(first) == "cuda":
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            if func in {Tensor.to, Tensor.cpu, Tensor.cuda}:
                return _moved(func, first, args[1:], given)
        if func in {Tensor.backward, torch.autograd.backward}:
            self._backward(*_tensors([first]), back=[*_tensors([args[1:], given])])
            return None
        return _called(func, args, given)

    def _backward(self, found: Tensor, *, back: Sequence[Tensor]) -> None:
        """Go back from a tensor, pretending on the way, too: layers may be computed once more."""
        with self:
            gradients = tuple(back) or (torch.ones_like(found),)
            _engine_run_backward(
                (found,), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _called(func: Callable[..., object], args: Sequence[object], given: dict[str, object]) -> object:
    meeting = [] if func in _ANYWHERE else list(_meeting(func, args, given))
    kinds = {mark_of(tensor) for tensor in meeting} - {None}
    if len(kinds) > 1:
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, found cuda:0 and cpu")
    if "cuda" in kinds and "mkldnn" in str(func):
        raise NotImplementedError(f"Could not run '{func}' with arguments from the 'CUDA' backend.")
    target = given.get("device")
    if isinstance(target, int | str | torch.device) and _type(target) != "meta":
        given["device"], kinds = _CPU, {_type(target)}
    elif next(_tensors([args, given]), None) is None:
        kinds = {"cpu"}
    given.pop("pin_memory", None)
    found = func(*args, **given)
    if func is scaled_dot_product_attention and "cuda" in kinds and isinstance(found, Tensor):
        found = found.transpose(1, 2).contiguous().transpose(1, 2)  # in the layout of a GPU's kernels
    mark(found, next(iter(kinds), None))
    return found


def _meeting(func: Callable[..., object], args: Sequence[object], given: object) -> Iterator[Tensor]:
    """Those that have to be on one device: a scalar of the CPU goes with all, and so do indices."""
    if func is Tensor.__getitem__ or (func is Tensor.__setitem__ and not _gathers(args[1])):
        args = args[:1]  # what is written to a slice is copied
    elif func in _INDEXED or func is Tensor.__setitem__:
        args = (args[0], args[-1])
    for tensor in _tensors([args, given]):
        if tensor.dim() or mark_of(tensor) == "cuda":
            yield tensor


def _type(device: int | str | torch.device) -> str:
    return "cuda" if isinstance(device, int) else torch.device(device).type


def _gathers(index: object) -> bool:
    """Whether an index picks places by their numbers."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list | Tensor) for part in parts)


def _moved(
    func: Callable[..., object], source: Tensor, rest: Sequence[object], given: dict[str, object]
) -> object:
    before, places = mark_of(source), [*rest]
    where = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}.get(func, before)
    for number, value in enumerate(rest):
        if isinstance(value, torch.device | str):
            where, places[number] = torch.device(value).type, _CPU
        elif isinstance(value, Tensor):
            where = mark_of(value)
    target = given.get("device")
    if isinstance(target, int | str | torch.device):
        where, given["device"] = _type(target), _CPU
    found = source if func is not Tensor.to else source.to(*places, **given)  # type: ignore[call-overload]
    shared = found.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    found = found.clone() if shared and where != before else found
    mark(found, where)
    return found


@contextmanager
def pretended() -> Iterator[None]:
    """Until the end there is a GPU, whose memory is the CPU's."""
    with ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=answer))
        streams = {"Stream": Stream, "Event": Stream, "current_stream": Stream, "stream": nullcontext}
        for name, kind in streams.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", kind))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", _record_stream))
        # A graph that is computed anew each time, from and to the memory of the first.
        stack.enter_context(
            mock.patch("rlhf_lightning.engines.native.cuda_graphs.GraphCapture.capture", _recorded)
        )
        where = {"is_cuda": property(_is_there), "device": property(lambda s: GPU if _is_there(s) else _CPU)}
        for name, field in where.items():
            stack.enter_context(mock.patch.object(torch.UntypedStorage, name, field, create=True))
        # What a layer keeps is looked at within an operation, where nobody pretends.
        checks = mock.patch.dict(
            _allowed_determinism_checks_to_fns, {"default": lambda kept: {"dtype": kept.dtype}}
        )
        stack.enter_context(checks)
        stack.enter_context(_Pretending())
        yield
