"""AdamW over a rank's shards in Megatron's wrappers, with the schedule and the clipping of `ClippedAdamW`.

float32                      the parameters are the masters
bfloat16                     masters are float32 copies
distributed optimizer        each replica has masters and moments of one interval of the flattened parameters
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor, nn

from rlhf_lightning.engines.optimizer import MOMENTS, Counters, adamw, gradient_norm, zero_moments
from rlhf_lightning.parallel.groups import ModelGroups, if_several
from rlhf_lightning.spec import OptimizerSpec


@dataclass(frozen=True)
class Piece:
    """The part of one of its parameters that a rank updates."""

    master: Tensor
    """float32, in the parameter's shape; flat where it is an interval of it."""
    interval: slice | None
    """Of the flattened parameter; None for all of it."""


class FrozenParameters:
    """The parameters of a model that does not train, read and written with the methods of `ShardedAdamW`.

    Args:
        parameters: of this rank, by name.
    """

    copies = False
    """See `ShardedAdamW.copies`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)

    def read(self, name: str, moment: str | None = None) -> Tensor:
        """This rank's part of a parameter."""
        return self._parameters[name].detach()

    def write(self, name: str, values: Tensor, moment: str | None = None) -> None:
        """Set this rank's part of a parameter."""
        self._parameters[name].data.copy_(values)

    def tensors(self) -> list[Tensor]:
        """Nothing: there are no moments or masters."""
        return []


class ShardedAdamW:
    """AdamW on float32 masters; a step whose gradient is not finite is skipped and counted."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        runs: list[DistributedDataParallel],
        spec: OptimizerSpec,
        *,
        groups: ModelGroups,
    ) -> None:
        self.spec, self.counters = spec, Counters(spec)
        self._parameters, self._groups = dict(parameters), groups
        self._distributed = bool(runs[0].ddp_config.use_distributed_optimizer)
        self._optimizer = self._wrap(runs)
        self._adamw: torch.optim.Optimizer = self._optimizer.optimizer
        self.moment_steps: int | None = None
        """Number of steps in the moments, also of a rank with no part of them; None: there are none yet."""

    def step(self) -> dict[str, float]:
        """Clip and step; the owner of the gradient buffers clears them."""
        self._optimizer.prepare_grads()
        norm = self._norm()
        if math.isfinite(norm):
            gradients = [p.grad for p in self._optimizer.get_parameters() if p.grad is not None]
            if 0 < self.spec.grad_clip < norm:
                torch._foreach_mul_(gradients, self.spec.grad_clip / norm)
            self.counters.set_rate(self._adamw)
            self._optimizer.step_with_ready_grads()
            self.moment_steps = 1 + (self.moment_steps or 0)
        self._optimizer.zero_grad()
        return self.counters.count(norm, stepped=math.isfinite(norm))

    def _norm(self) -> float:
        """L2 norm of all gradients of the model, each number counted once, and the same bits on all ranks.

        A group adds up in an order that its communicator chooses, so those whose sums may differ take one.
        """
        gradients = self._optimizer.get_main_grads_for_grad_norm()
        device = next(iter(self._parameters.values())).device
        norm = gradient_norm(gradients, group=self._groups.replica, device=device)
        if self._distributed:
            squared = norm.square()
            dist.all_reduce(squared, group=self._groups.data)
            norm = squared.sqrt()
        if several := if_several(self._groups.replica if self._distributed else self._groups.data):
            dist.broadcast(norm, group=several, group_src=0)
        return float(norm)

    def piece(self, name: str) -> Piece | None:
        """The part of a parameter that this rank updates; None where there is none."""
        parameter = self._parameters[name]
        if not self._distributed:
            return Piece(getattr(parameter, "main_param", parameter), None)
        place = self._optimizer.model_param_group_index_map.get(parameter)
        if place is None:
            return None
        group, number = place
        span = self._optimizer._get_model_param_range_map(parameter)["param"]
        return Piece(self._adamw.param_groups[group]["params"][number], slice(span.start, span.end))

    def read(self, name: str, moment: str | None = None) -> Tensor:
        """This rank's shard of a parameter's master or moment; collective with a distributed optimizer.

        Returns:
            float32, in the shape of the parameter.
        """
        parameter, piece = self._parameters[name], self.piece(name)
        if piece is not None and piece.interval is None:
            return self._tensor(piece, moment)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if piece is not None:
            whole[piece.interval] = self._tensor(piece, moment)
        dist.all_reduce(whole, group=self._groups.data)
        return whole.view(parameter.shape)

    def write(self, name: str, values: Tensor, moment: str | None = None) -> None:
        """Set this rank's shard of a parameter and its master, or of a moment."""
        parameter, piece = self._parameters[name], self.piece(name)
        if moment is None:
            parameter.data.copy_(values)
        if piece is not None:
            part = values if piece.interval is None else values.flatten()[piece.interval]
            self._tensor(piece, moment).copy_(part)

    def tensors(self) -> list[Tensor]:
        """All tensors beside the parameters: moments, and masters that are copies."""
        moments = [state[moment] for state in self._adamw.state.values() for moment in MOMENTS]
        owned = {p.untyped_storage().data_ptr() for p in self._parameters.values()}
        masters = [m.detach() for group in self._adamw.param_groups for m in group["params"]]
        return moments + [m for m in masters if m.untyped_storage().data_ptr() not in owned]

    @property
    def copies(self) -> bool:
        """Whether masters are copies of the parameters."""
        return next(iter(self._parameters.values())).dtype != torch.float32

    def make_moments(self, steps: int | None) -> None:
        """Allocate moments of 0, to be overwritten, that count as many steps; None: no moments."""
        self._adamw.state.clear()
        self.moment_steps = steps
        if steps is None:
            return
        for group in self._adamw.param_groups:
            for master in group["params"]:
                self._adamw.state[master] = zero_moments(master, steps, device="cpu")

    def _tensor(self, piece: Piece, moment: str | None) -> Tensor:
        master = piece.master
        tensor: Tensor = master.detach() if moment is None else self._adamw.state[master][moment]
        return tensor

    def _wrap(self, runs: list[DistributedDataParallel]) -> MegatronOptimizer:
        """Wrap AdamW without Megatron's collective calls over all ranks of the job: some lack the model."""
        half = self.copies
        config = OptimizerConfig(bf16=half, use_distributed_optimizer=self._distributed)
        # Not fused, which needs moments of the parameters' strides, and generation changes those; nor what
        # torch chooses on a GPU by itself, which makes roots of all moments at once, 4 bytes a parameter.
        inner = adamw(self._parameters.values(), self.spec, fused=False)
        if self._distributed:
            return DistributedOptimizer(
                inner,
                config,
                None,
                None,
                model_chunks=runs,
                per_model_buffers={number: run.buffers for number, run in enumerate(runs)},
                data_parallel_group=self._groups.data,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=self._groups.replica.rank(),
                distributed_optimizer_instance_id=0,
            )
        if half:
            return Float16OptimizerWithFloat16Params(inner, config, None, None)
        return FP32Optimizer(inner, config, None)
