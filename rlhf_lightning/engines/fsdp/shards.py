"""The weights of a model that is sharded over the ranks of a group with FSDP2.

between calls        each of the d ranks of a copy holds 1/d of every float32 parameter (masters: DTensors);
                     with t tensor ranks, 1/d of its 1/t of every divided layer
forward, backward    unit by unit: all-gather in the dtype of the computation -> compute -> free
after backward       reduce-scatter of the gradients in float32, then their sum over the copies, if several
gathered()           all-gather of all units -> a plain skeleton points at the tensors -> free;
                     with tensor ranks, one parameter after the other

A unit is a decoder layer where that saves memory. Where everything stays gathered until the last gradient,
the whole model is one unit, and ranks wait for each other once a pass instead of once a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlhf_lightning.engines.dtensor import gather, local
from rlhf_lightning.engines.fsdp.mesh import Mesh
from rlhf_lightning.engines.huggingface.tensor_plan import divide
from rlhf_lightning.engines.optimizer import add_up
from rlhf_lightning.engines.training import Transition


class Shards:
    """Weights sharded over a group; see the head of the module.

    Args:
        root: the module whose forward is called; it is, or contains, the model.
        model: the Hugging Face model, whole and equal on every rank, in the dtype of its files; becomes
            sharded. Frozen parameters are kept in `dtype`.
        mesh: ranks to shard over, on whose device it computes.
        dtype: of the computation.
        reshard: whether layers are freed after their forward pass.
        defer: whether gradients are reduced once, after the last micro-batch.
    """

    def __init__(
        self,
        root: nn.Module,
        model: PreTrainedModel,
        *,
        mesh: Mesh,
        dtype: torch.dtype,
        reshard: bool,
        defer: bool,
    ) -> None:
        self._model, self._skeleton = model, skeleton(model)
        self._tensor = mesh.tensor
        self._summed = divide(model, mesh.tensor) if mesh.tensor is not None else frozenset()
        layers = layers_of(model) if reshard or not defer else []
        self._units = _sharded([*layers, root], mesh.data, dtype)
        _cast(root, dtype)
        for unit in self._units[:-1]:
            unit.set_reshard_after_forward(reshard)
        self.stored: dict[str, Tensor] = dict(model.named_parameters())
        self.masters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.group = mesh.everyone
        """All ranks of the model: copies that clipped by norms of their own would part."""
        self._ranks, self._defer, self._dtype = mesh.data.size(), defer, dtype

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch's loss, summed over the ranks, to that of the masters."""
        self._units[-1].set_requires_gradient_sync(last or not self._defer)
        torch.autograd.backward(loss * self._ranks)  # FSDP2 takes the mean over the ranks

    def sync_gradients(self) -> None:
        """Make the gradients of parameters that every tensor rank has whole equal on all of them.

        Of norms of single heads it is the sum, since each rank sees its own heads only. Elsewhere the ranks'
        gradients are equal but for rounding, and the mean keeps the parameters from drifting apart.
        """
        if self._tensor is None:
            return
        whole = {name: p for name, p in self.masters.items() if _is_whole(p, self._tensor)}
        parts = {name: local(p.grad) for name, p in whole.items() if p.grad is not None}
        add_up(parts.values(), group=self._tensor.get_group())
        for name, part in parts.items():
            if name not in self._summed:
                part.div_(self._tensor.size())

    def after_forward(self) -> None:
        """Free the units that a forward pass without a backward pass leaves gathered."""
        for unit in self._units:
            unit.reshard()

    def refresh(self) -> None:
        """Nothing to do: every all-gather reads the masters."""

    def beside_masters(self) -> list[Tensor]:
        """The tensors beside the masters that hold weights between calls: frozen parameters."""
        return [tensor for name, tensor in self.stored.items() if name not in self.masters]

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Gather one parameter after the other, in the dtype of the computation."""
        for name, tensor in self.stored.items():
            yield name, gather(tensor.detach().to(self._dtype))

    def transition(self, seconds: float) -> Transition:
        """The report of `gathered`, in which every rank receives the parts that it lacks."""
        size = self._dtype.itemsize
        parts = sum(local(tensor).numel() for tensor in self.stored.values()) * size
        whole = sum(tensor.numel() for tensor in self.stored.values()) * size
        return Transition(
            seconds=seconds, received_bytes=whole - parts, training_bytes=parts, generation_bytes=whole
        )

    @contextmanager
    def gathered(self) -> Iterator[PreTrainedModel]:
        """A plain module over gathered tensors, which are freed on exit."""
        try:
            with filled(self._skeleton, self._whole_parameters()) as module:
                yield module
        finally:
            self.after_forward()

    def _whole_parameters(self) -> Iterable[tuple[str, Tensor]]:
        if self._tensor is not None:
            return self.whole()
        for unit in self._units:
            unit.unshard()
        return self._model.named_parameters()


def _sharded(modules: Sequence[nn.Module], mesh: DeviceMesh, dtype: torch.dtype) -> list[FSDPModule]:
    """Make modules units of FSDP, the innermost first."""
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    return [fully_shard(module, mesh=mesh, mp_policy=precision) for module in modules]


def _is_whole(parameter: Tensor, tensor: DeviceMesh) -> bool:
    """Whether a parameter is not divided over tensor ranks."""
    assert isinstance(parameter, DTensor)
    names = parameter.device_mesh.mesh_dim_names or ()
    return names[-1:] != tensor.mesh_dim_names or parameter.placements[-1].is_replicate()


def _cast(root: nn.Module, dtype: torch.dtype) -> None:
    """Cast this rank's shards: to float32 masters, or to the computation's dtype where they are frozen."""

    def kept(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        return tensor.to(torch.float32 if tensor.requires_grad else dtype)

    root._apply(kept)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model that shares its buffers and whose parameters take no memory."""
    shared: dict[int, Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, {**shared, **empty})


@contextmanager
def filled(module: PreTrainedModel, values: Iterable[tuple[str, Tensor]]) -> Iterator[PreTrainedModel]:
    """Within this context a `skeleton` has these values, by parameters' first names; then none again."""
    empty = dict(module.named_parameters(remove_duplicate=False))
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in empty.items():
        names.setdefault(parameter, []).append(name)
    try:
        for first, value in values:
            parameter = nn.Parameter(value.detach(), requires_grad=False)
            for name in names[empty[first]]:
                _set_parameter(module, name, parameter)
        yield module
    finally:
        for name, parameter in empty.items():
            _set_parameter(module, name, parameter)


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set a parameter of a module by its dotted name."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
