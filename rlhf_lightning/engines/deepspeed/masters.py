"""Reads and writes DeepSpeed's float32 masters and moments, parameter by parameter.

DeepSpeed keeps them in flat partitions, one per rank, whose bounds may cut a parameter:

flat partition of a rank   [ ..a][ b         ][ c..]      masters, first moments, second moments
parameters                [a   ][ b         ][ c      ]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_lightning.engines.deepspeed.scope import ZeROModule
from rlhf_lightning.engines.optimizer import MOMENTS, zero_moments


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that a rank updates."""

    flat: nn.Parameter
    """The rank's flat partition of masters, float32."""
    at: slice
    """Where the piece is in the partition."""
    of: slice
    """Where the piece is in the flattened parameter."""


class Masters:
    """Masters and moments of one model.

    Args:
        module: DeepSpeed's module.
        parameters: the model's, by name.
        shapes: of the whole parameters, by name.
        adamw: the optimizer that holds the moments.
        group: ranks that the masters are sharded over.
    """

    def __init__(
        self,
        module: ZeROModule,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, torch.Size],
        *,
        adamw: torch.optim.Optimizer,
        group: dist.ProcessGroup,
    ) -> None:
        self.shapes, self._parameters = dict(shapes), dict(parameters)
        self._zero, self._adamw, self._group = module.optimizer, adamw, group
        self._divided = module.zero_optimization_partition_weights()
        self._pieces = {name: self._piece(name) for name in self._parameters}

    def read(self, name: str, moment: str | None = None) -> Tensor:
        """A parameter's whole master or moment; collective.

        Returns:
            float32, in the shape of the parameter, on its device.
        """
        shape, piece = self.shapes[name], self._pieces[name]
        whole = torch.zeros(shape.numel(), device=self._parameters[name].device)
        if piece is not None:
            whole[piece.of] = self._tensor(piece, moment)[piece.at].to(whole.device)
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(whole, group=self._group)
        return whole.view(shape)

    def write(self, name: str, values: Tensor, moment: str | None = None) -> None:
        """Set this rank's piece of a master or moment from whole values; call `refresh` after masters."""
        piece = self._pieces[name]
        if piece is not None:
            self._tensor(piece, moment)[piece.at].copy_(values.flatten()[piece.of])

    def lerp(self, name: str, values: Tensor, *, weight: float) -> None:
        """Set this rank's piece of a master to (1 - weight) master + weight values; then call `refresh`."""
        piece = self._pieces[name]
        if piece is not None:
            own = self._tensor(piece, None)[piece.at]
            own.lerp_(values.flatten()[piece.of].to(own.device), weight)

    def refresh(self) -> None:
        """Copy the masters to the parameters that compute; all ranks call it."""
        zero = self._zero
        if not self._divided:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)

    @property
    def moment_steps(self) -> int | None:
        """Number of steps in the moments; None where there are no moments yet."""
        states = [self._adamw.state[flat] for flat in self._flats if flat in self._adamw.state]
        return int(states[0]["step"]) if states else None

    def make_moments(self, steps: int | None) -> None:
        """Allocate moments of 0, to be overwritten, that count as many steps; None: no moments."""
        self._adamw.state.clear()
        if not self._divided:
            self._zero._hp_optimizer_states_linked = False
        if steps is None:
            return
        for flat in self._flats:
            self._adamw.state[flat] = zero_moments(flat, steps, device=flat.device)

    def tensors(self) -> list[Tensor]:
        """All masters and moments of this rank."""
        moments = [state[moment] for state in self._adamw.state.values() for moment in MOMENTS]
        return [flat.detach() for flat in self._flats] + moments

    def gradients(self) -> list[Tensor]:
        """All tensors in which this rank keeps gradients, between backward passes and up to the step."""
        zero = self._zero
        found = [flat.grad for flat in self._flats]
        if self._divided:
            return [*_present(found), zero.grad_partitions_flat_buffer]
        for lists in (zero.all_grad_tensors, zero.averaged_gradients):
            found += [gradient for group in lists.values() for gradient in group or ()]
        found += getattr(zero, "accumulated_grads_in_cpu", {}).values()
        for parameter in self._parameters.values():
            found += [parameter.grad, parameter.grad_accum]  # type: ignore[attr-defined]
        return _present(found)

    def forget_gradients(self) -> None:
        """Drop the gradients of a skipped step, to which DeepSpeed 0.19.8 adds if masters are on the host."""
        if not self._divided:
            self._zero.averaged_gradients.update(dict.fromkeys(self._zero.averaged_gradients))

    @property
    def _flats(self) -> list[nn.Parameter]:
        zero = self._zero
        flats: list[nn.Parameter] = (
            zero.fp32_partitioned_groups_flat if self._divided else zero.single_partition_of_fp32_groups
        )
        return flats

    def _tensor(self, piece: Piece, moment: str | None) -> Tensor:
        tensor: Tensor = piece.flat.detach() if moment is None else self._adamw.state[piece.flat][moment]
        return tensor

    def _piece(self, name: str) -> Piece | None:
        parameter, zero = self._parameters[name], self._zero
        if not self._divided:
            found = parameter._hp_mapping  # type: ignore[attr-defined]
            if found is None:
                return None
            flat, at, of = found.param_group_index, found.hp_fragment_address, found.lp_fragment_address
            ends = (at.start + at.numel, of.start + of.numel)
            return Piece(self._flats[flat], slice(at.start, ends[0]), slice(of.start, ends[1]))
        flat, start, size = zero.grad_position[zero.get_param_id(parameter)]
        first = size * dist.get_rank(self._group)
        size = min(size, self.shapes[name].numel() - first)  # the last shards are padded
        if size <= 0:
            return None
        return Piece(self._flats[flat], slice(start, start + size), slice(first, first + size))


def _present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
