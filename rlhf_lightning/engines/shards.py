"""The weights of a model that is sharded over the ranks of a group with FSDP2.

between calls        each rank holds 1/d of every float32 parameter (the masters: DTensors), d ranks a copy
forward, backward    unit by unit: all-gather in the type of the computation -> compute -> free
after backward       reduce-scatter of the gradients in float32, then their sum over the copies, if several
gathered()           all-gather of all units -> a plain skeleton points at the tensors -> free

A unit is a decoder layer where that saves memory; where everything stays gathered until the last gradient,
the whole model is one, and the ranks wait for each other once a pass instead of once a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlhf_lightning.engines.engine import Transition
from rlhf_lightning.engines.optimizer import local


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When memory is given back; see the fields of `FSDP`."""

    reshard_after_forward: bool
    defer_reduction: bool

    @property
    def saves_memory(self) -> bool:
        """Whether anything is given back before the last backward pass has ended."""
        return self.reshard_after_forward or not self.defer_reduction


class Shards:
    """Weights sharded over a group.

    Args:
        root: the module whose forward is called; it is, or contains, the model.
        model: the Hugging Face model, whole and alike on every rank; what is frozen is kept in `dtype`.
        mesh: ranks to shard over; where it has two axes, the first is of copies.
        device: where it computes.
        dtype: what it computes in.
        schedule: when layers are freed and gradients reduced.
    """

    def __init__(
        self,
        root: nn.Module,
        model: PreTrainedModel,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        dtype: torch.dtype,
        schedule: Schedule,
    ) -> None:
        self._model, self._skeleton = model, _skeleton(model)
        precision = MixedPrecisionPolicy()
        if dtype != torch.float32:
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        _place_rest(model, device, dtype)
        layers = _layers(model) if schedule.saves_memory else []
        self._units = [fully_shard(module, mesh=mesh, mp_policy=precision) for module in (*layers, root)]
        for unit in self._units[:-1]:
            unit.set_reshard_after_forward(schedule.reshard_after_forward, recurse=False)
        self.stored: dict[str, Tensor] = dict(model.named_parameters())
        self.masters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.group = mesh.get_group(mesh.ndim - 1)
        """Ranks that divide one copy."""
        self._ranks, self._defer = mesh.size(), schedule.defer_reduction
        self._dtype = dtype

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch's loss, summed over the ranks, to that of the masters."""
        self._units[-1].set_requires_gradient_sync(last or not self._defer)
        torch.autograd.backward(loss * self._ranks)  # FSDP2 takes the mean over the ranks

    def after_forward(self) -> None:
        """Free what a forward pass without a backward pass leaves gathered."""
        for unit in self._units:
            unit.reshard()

    def changed(self) -> None:
        """Nothing to do: every all-gather reads the masters."""

    def copies(self) -> list[Tensor]:
        """Tensors beside the masters that hold weights between calls: the frozen ones."""
        return [tensor for name, tensor in self.stored.items() if name not in self.masters]

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Gather one parameter after the other, in the type of the computation."""
        for name, tensor in self.stored.items():
            part = tensor.detach().to(self._dtype)
            yield name, part.full_tensor() if isinstance(part, DTensor) else part

    def transition(self, seconds: float) -> Transition:
        """What `gathered` took: this rank's part of every parameter grows to the whole."""
        size = self._dtype.itemsize
        parts = sum(local(tensor).numel() for tensor in self.stored.values()) * size
        whole = sum(tensor.numel() for tensor in self.stored.values()) * size
        return Transition(
            seconds=seconds, received_bytes=whole - parts, training_bytes=parts, generation_bytes=whole
        )

    @contextmanager
    def gathered(self) -> Iterator[PreTrainedModel]:
        """A plain module that reads the gathered tensors, which are freed on exit."""
        for unit in self._units:
            unit.unshard()
        empty = dict(self._skeleton.named_parameters(remove_duplicate=False))
        try:
            for name, parameter in self._model.named_parameters(remove_duplicate=False):
                _place(self._skeleton, name, parameter)
            yield self._skeleton
        finally:
            for name, parameter in empty.items():
                _place(self._skeleton, name, parameter)
            self.after_forward()


def _place_rest(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Keep frozen parameters in the type of the computation, and buffers on the device."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model that shares its buffers and whose parameters take no memory."""
    shared: dict[int, Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, {**shared, **empty})


def _place(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
