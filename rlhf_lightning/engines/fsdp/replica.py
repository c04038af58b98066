"""The weights of a model that is whole on each of its devices (data parallelism without sharding).

backward          gradients stay on their rank
sync_gradients    gradients are summed over the ranks, bucket by bucket, to the same bits on all of them
step              each rank makes the same step, so the copies stay equal
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_lightning.engines.optimizer import add_up
from rlhf_lightning.engines.training import Transition


class Replica:
    """All weights on one device, with float32 masters where the model computes in bfloat16.

    In float32 the masters are the module's own parameters. In bfloat16 the module has bfloat16 parameters:
    their gradients are moved to the float32 masters in every backward pass, and `refresh` copies the masters
    back after each step. Frozen parameters have no masters.

    Args:
        model: on its device, with weights in the dtype of its files; changed in place.
        dtype: of the computation.
        copies: ranks that train a copy each, with rows of their own; None for one.
    """

    group: None = None
    """The ranks that parameters are sharded over: none."""

    def __init__(
        self, model: PreTrainedModel, *, dtype: torch.dtype, copies: dist.ProcessGroup | None = None
    ) -> None:
        self._model, self._copies = model, copies
        self._working = dict(model.named_parameters())
        self._cast = dtype != torch.float32
        trained = [name for name, parameter in self._working.items() if parameter.requires_grad]
        values = {name: _own(self._working[name].detach(), torch.float32) for name in trained}
        for name, parameter in self._working.items():
            parameter.data = (
                values[name] if name in values and not self._cast else _own(parameter.data, dtype)
            )
        self.masters = {name: self._working[name] for name in trained}
        if self._cast:
            self.masters = {name: nn.Parameter(value) for name, value in values.items()}
            for name, master in self.masters.items():
                self._working[name].register_post_accumulate_grad_hook(_move_gradient(master))
        self.stored: dict[str, Tensor] = {**self._working, **self.masters}
        """Every parameter by name, of trained ones the master."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch's loss to that of the masters."""
        torch.autograd.backward(loss)

    def sync_gradients(self) -> None:
        """Sum the gradients over all copies."""
        if self._copies is not None:
            gradients = [master.grad for master in self.masters.values() if master.grad is not None]
            add_up(gradients, group=self._copies)

    def after_forward(self) -> None:
        """Nothing to free."""

    def refresh(self) -> None:
        """Copy the masters to the parameters that compute, after the masters have changed."""
        if self._cast and self.masters:
            with torch.no_grad():
                working: list[Tensor] = [self._working[name] for name in self.masters]
                torch._foreach_copy_(working, list(self.masters.values()))

    def beside_masters(self) -> list[Tensor]:
        """The tensors beside the masters that hold weights."""
        return [p for name, p in self._working.items() if self._cast or name not in self.masters]

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that compute, by name."""
        for name, parameter in self._working.items():
            yield name, parameter.detach()

    def transition(self, seconds: float) -> Transition:
        """The report of `gathered`, which moves nothing."""
        size = sum(parameter.nbytes for parameter in self._working.values())
        return Transition(seconds=seconds, training_bytes=size, generation_bytes=size)

    @contextmanager
    def gathered(self) -> Iterator[PreTrainedModel]:
        """The model itself."""
        yield self._model


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`, in memory of its own: not mapped from a weight file, which may change."""
    found = tensor.to(dtype)
    return found if found.untyped_storage().resizable() else found.clone()


def _move_gradient(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's gradient to that of its master, and clears it."""

    def hook(parameter: Tensor) -> None:
        gradient = cast(Tensor, parameter.grad)
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return hook
