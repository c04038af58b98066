"""AdamW with a learning-rate schedule and clipping by global norm, over whole or sharded parameters.

The FSDP engine steps with `ClippedAdamW`. Those of Megatron and DeepSpeed wrap torch's AdamW themselves, and
use the schedule and the counters of this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from rlhf_lightning.engines.dtensor import local
from rlhf_lightning.engines.host_memory import give_back_freed_memory
from rlhf_lightning.parallel.shares import fitting_together
from rlhf_lightning.spec import OptimizerSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names for the state that it keeps of each parameter."""
STEPS_TO_TRIM = 50
"""Optimizer steps from one giving back of freed memory to the next."""
_BUCKET_BYTES = 1 << 26
"""Most bytes of small tensors that are summed over ranks in one message."""


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Learning rate of the optimizer step that comes after `step` others.

    The n-th of w warm-up steps takes n / (w + 1) of the peak, so that no step has a rate of 0 and the step
    after them is the first at the peak. `linear` and `cosine` fall from the peak to min_lr_ratio of it, which
    they reach after total_steps.
    """
    warmup = spec.warmup
    if step < warmup:
        return spec.lr * (step + 1) / (warmup + 1)
    if spec.schedule == "constant":
        return spec.lr
    done = min(1.0, (step - warmup) / (spec.total_steps - warmup))
    left = 1 - done if spec.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * left)


def adamw(parameters: Iterable[nn.Parameter], spec: OptimizerSpec, *, fused: bool) -> AdamW:
    """AdamW as a model's options say; without parameters too, which torch refuses in a bare list.

    Args:
        parameters: to step.
        spec: the options.
        fused: whether one kernel steps all of them, or the parameters are stepped one after the other.
    """
    return AdamW(
        [{"params": list(parameters)}],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=fused,
    )


def zero_moments(master: Tensor, steps: int, *, device: torch.device | str) -> dict[str, Tensor]:
    """AdamW's state of a parameter after `steps` steps, with moments of 0 that are to be overwritten.

    Args:
        master: the parameter.
        steps: number of steps so far.
        device: of the step count; fused AdamW needs that of the parameter.
    """
    moments = {moment: torch.zeros_like(master, requires_grad=False) for moment in MOMENTS}
    return {"step": torch.tensor(float(steps), device=device), **moments}


def gradient_norm(
    gradients: Iterable[Tensor], *, group: dist.ProcessGroup | None, device: torch.device
) -> Tensor:
    """L2 norm of all gradients, over the ranks of the group that hold shards of them: scalar, float32.

    A shard that several of these ranks hold counts once. All ranks of the group call it, also those without
    gradients; they communicate on `device`.
    """
    shards: dict[int, list[Tensor]] = {1: []}
    for gradient in gradients:
        if local(gradient).numel():
            shards.setdefault(_holders(gradient, group), []).append(local(gradient))
    # `to`: without gradients the norm is on the CPU.
    norms = {count: nn.utils.get_total_norm(held).to(device) for count, held in shards.items()}
    if group is None:
        return norms[1]
    squared = torch.stack([norm.square().float() / count for count, norm in norms.items()]).sum()
    dist.all_reduce(squared, group=group)
    return squared.sqrt()


def _holders(tensor: Tensor, group: dist.ProcessGroup | None) -> int:
    """Number of ranks of the group that hold the same shard of a tensor as this one."""
    if group is None or not isinstance(tensor, DTensor):
        return 1
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return group.size() // math.prod(size for size, placement in axes if not placement.is_replicate())


def add_up(tensors: Iterable[Tensor], *, group: dist.ProcessGroup) -> None:
    """Sum each tensor over the ranks of a group, in place; all ranks get the same bits."""
    every = list(tensors)
    for run in fitting_together([tensor.nbytes for tensor in every], _BUCKET_BYTES):
        bucket = every[run]
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        totals = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [total.view_as(t) for total, t in zip(totals, bucket, strict=True)])


class Counters:
    """Counts optimizer steps, sets the learning rate that follows from them, and reports each step.

    Every 50th step gives freed memory back to the system.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec, self.steps, self.skipped_steps = spec, 0, 0

    def set_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Set an optimizer's learning rate for its next step."""
        for settings in optimizer.param_groups:
            settings["lr"] = learning_rate(self._spec, self.steps)

    def count(self, norm: float, *, stepped: bool) -> dict[str, float]:
        """Count a step, or one that was skipped, and report it.

        Returns:
            grad_norm and lr of this step, and skipped_steps so far.
        """
        rate = learning_rate(self._spec, self.steps)
        self.steps += stepped
        self.skipped_steps += not stepped
        if (self.steps + self.skipped_steps) % STEPS_TO_TRIM == 0:
            give_back_freed_memory()
        return {"grad_norm": norm, "lr": rate, "skipped_steps": float(self.skipped_steps)}

    def state(self, moment_steps: dict[str, int]) -> dict[str, object]:
        """Plain numbers for `restore`.

        Args:
            moment_steps: number of steps in each parameter's moments, by name.
        """
        return {"steps": self.steps, "skipped_steps": self.skipped_steps, "moment_steps": moment_steps}

    def restore(self, state: Mapping[str, object], *, known: Iterable[str]) -> dict[str, int]:
        """Continue from `state`.

        Returns:
            The number of steps in each parameter's moments, by name.

        Raises:
            ValueError: it is the state of other parameters than `known`.
        """
        steps, skipped, moments = (state.get(key) for key in ("steps", "skipped_steps", "moment_steps"))
        if not (isinstance(steps, int) and isinstance(skipped, int) and isinstance(moments, dict)):
            raise ValueError(
                "optimizer state: steps, skipped_steps or moment_steps is missing. Type the directory of a "
                "checkpoint that a training engine has written."
            )
        if unknown := sorted(set(moments) - set(known)):
            raise ValueError(
                f"optimizer state: of another model, this one has no {unknown[0]}. Type a checkpoint of this "
                "model."
            )
        self.steps, self.skipped_steps = steps, skipped
        return moments


class ClippedAdamW:
    """AdamW on float32 parameters; a step whose gradient is not finite is skipped and counted.

    Args:
        parameters: by name; DTensors where they are sharded.
        spec: rates, clipping and schedule.
        group: ranks that hold DTensor parameters, copies of shards too; None where the parameters are whole.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        spec: OptimizerSpec,
        *,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.spec, self._counters = spec, Counters(spec)
        self._parameters = dict(parameters)
        self._group = group
        devices = (local(parameter.detach()).device for parameter in self._parameters.values())
        self._device = next(devices, torch.device("cpu"))
        self._adamw = adamw(self._parameters.values(), spec, fused=True)

    def step(self) -> dict[str, float]:
        """Clip, step and clear the gradients."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = float(gradient_norm(gradients, group=self._group, device=self._device))
        if math.isfinite(norm):
            if 0 < self.spec.grad_clip < norm:
                torch._foreach_mul_([local(gradient) for gradient in gradients], self.spec.grad_clip / norm)
            self._counters.set_rate(self._adamw)
            self._adamw.step()
        self._adamw.zero_grad()
        return self._counters.count(norm, stepped=math.isfinite(norm))

    def tensors(self) -> dict[str, Tensor]:
        """The moments that exist, by name: `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`."""
        state = self._adamw.state
        return {
            f"{moment}.{name}": state[parameter][moment]
            for name, parameter in self._parameters.items()
            if parameter in state
            for moment in MOMENTS
        }

    def state(self) -> dict[str, object]:
        """Plain numbers for `restore`."""
        state = self._adamw.state
        return self._counters.state(
            {name: int(state[p]["step"]) for name, p in self._parameters.items() if p in state}
        )

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from `state`; the moments are zeros, to be loaded in place.

        Raises:
            ValueError: it is the state of other parameters.
        """
        moments = self._counters.restore(state, known=self._parameters)
        self._adamw.state.clear()
        for name, count in moments.items():
            parameter = self._parameters[name]
            self._adamw.state[parameter] = zero_moments(parameter, count, device=local(parameter).device)
