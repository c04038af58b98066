"""Rows -> micro-batches of a token budget -> forward and backward passes, in step on the ranks of a group.

FSDP and DeepSpeed compute with it. Ranks that shard a model agree on the number of micro-batches, since a
layer is gathered on all ranks or on none; a rank that has run out of rows computes one filler token, which no
loss counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

from rlhf_lightning.engines.head import Asked, Head
from rlhf_lightning.engines.packed.forward import forward, zero_outputs
from rlhf_lightning.engines.packed.kept_passes import KeptPasses
from rlhf_lightning.engines.packed.packing import plan, select
from rlhf_lightning.functional.aggregate import Counts, Loss, run_loss
from rlhf_lightning.parallel.scope import need_all_ranks


class Backward(Protocol):
    """Adds the gradient of a micro-batch's loss to the gradients."""

    def __call__(self, loss: Tensor, *, last: bool) -> None:
        """Run the backward pass; `last` says that no micro-batch follows."""


class Passes:
    """Evaluates rows with a module, and accumulates gradients.

    Args:
        root: a causal language model, a `ScalarModel`, or what can be called like one.
        head: what the model computes per response token.
        group: ranks that compute the same number of micro-batches; None where ranks need not agree.
        device: where the model computes.
        budget: most tokens in a micro-batch.
        kept: keeps passes of `infer` for `accumulate`; None: nothing is kept.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        head: Head,
        group: dist.ProcessGroup | None,
        device: torch.device,
        budget: int,
        kept: KeptPasses | None = None,
    ) -> None:
        self._root, self._head, self._group, self._device, self._budget = root, head, group, device, budget
        self._kept = kept or KeptPasses(0)

    def infer(self, rows: TensorDict, *, temperature: float, asked: Asked, keep: bool = False) -> TensorDict:
        """See `TrainEngine.infer`."""
        results = zero_outputs(rows, head=self._head, asked=asked)
        if keep:
            self._kept.begin(rows, temperature=temperature)
        for index in self._plan(rows):
            part = select(rows, index, None, device=self._device, also=asked.columns)
            kept = keep and self._kept.admits(part)
            needed = replace(asked, entropy=asked.entropy or kept)  # the loss of the update may read it
            with torch.set_grad_enabled(kept):
                outputs = forward(self._root, part, head=self._head, temperature=temperature, asked=needed)
            if kept:
                self._kept.add(index, outputs)
            for name, values in results.items() if index else ():
                values[index] = outputs[name].detach().cpu()
        return TensorDict(results, batch_size=rows.batch_size)

    def forget(self) -> None:
        """Free the passes that `infer` kept, and the record; called when weights change or are offloaded."""
        self._kept.forget()

    def accumulate(
        self,
        rows: TensorDict,
        loss: Loss,
        counts: Counts,
        *,
        temperature: float,
        backward: Backward,
    ) -> dict[str, Tensor]:
        """See `TrainEngine.accumulate`; `backward` is called once per micro-batch."""
        parts, asked = self._plan(rows, loss), Asked.by(loss)
        totals: dict[str, Tensor] = {}
        self._kept.drop_others(rows, temperature=temperature)
        for number, index in enumerate(parts):
            part = select(rows, index, loss, device=self._device)
            outputs = self._kept.pop(index, asked=asked) or forward(
                self._root,
                part,
                head=self._head,
                temperature=temperature,
                asked=asked,
                record=self._kept.record,
            )
            value, metrics = run_loss(loss, outputs, part, counts)
            backward(value, last=number == len(parts) - 1)
            for name, metric in metrics.items():
                totals[name] = totals.get(name, 0.0) + metric.detach()
        self._kept.release()
        return {name: total.cpu() for name, total in totals.items()}

    def _plan(self, rows: TensorDict, loss: Loss | None = None) -> list[list[int]]:
        """Row numbers of each micro-batch: as many on all ranks, empty ones where a rank has no rows left.

        With a loss there is at least one micro-batch, so that every rank has gradients.
        """
        parts = plan(rows, self._budget, loss)
        count = torch.tensor(len(parts), device=self._device)
        if self._group is not None:
            need_all_ranks("engine")
            dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._group)
        return parts + [[] for _ in range(int(count) - len(parts))]
