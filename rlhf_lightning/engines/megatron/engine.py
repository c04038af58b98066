"""The Megatron engine: a Hugging Face decoder in p stages of t tensor shards, d times (3-D parallelism).

    rows -> micro-batches of a token budget -> packed without padding -> stages, one after the other (1F1B)
         -> log-probabilities from logits that stay divided by vocabulary -> [n, R] -> loss
         -> gradients summed over micro-batches, replicas and both copies of a tied embedding -> AdamW step
All ranks of a replica get the same rows; replicas get different rows, any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from tensordict import TensorDict
from torch import Tensor, nn

from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.engines.head import PLAIN, Asked, Head
from rlhf_lightning.engines.host_memory import keep_freed_memory
from rlhf_lightning.engines.huggingface.models import empty_model, export_model, read_config
from rlhf_lightning.engines.hybrid import HybridEngine
from rlhf_lightning.engines.megatron.config import Megatron, check_layout
from rlhf_lightning.engines.megatron.model import Run, mark, transformer_config
from rlhf_lightning.engines.megatron.optimizer import FrozenParameters, ShardedAdamW
from rlhf_lightning.engines.megatron.schedule import Pipeline, Rows
from rlhf_lightning.engines.megatron.scope import Scope
from rlhf_lightning.engines.megatron.state import load, save, wait
from rlhf_lightning.engines.megatron.weights import Weights
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.engines.offload import PARTS, OffloadedParts, Part
from rlhf_lightning.engines.packed.forward import Vocabulary, said, zero_outputs
from rlhf_lightning.engines.packed.packing import PackedRows, pack, plan, select
from rlhf_lightning.engines.packed.same_rows import check_same_rows
from rlhf_lightning.engines.training import Shard, TrainEngine, Transition
from rlhf_lightning.functional.aggregate import Counts, Loss, run_loss
from rlhf_lightning.parallel.sharding import even_stages
from rlhf_lightning.parallel.world import Seat
from rlhf_lightning.spec import ModelSpec


class MegatronEngine(TrainEngine):
    """See the head of the module.

    Args:
        model: what to load, and how to optimise it.
        head: what the model computes per response token.
        seat: this rank's place, with all its groups.
        config: options of the engine.

    Raises:
        ValueError: the model cannot be loaded, or the layout cannot divide it.
    """

    def __init__(
        self, model: ModelSpec, *, head: Head = "lm", seat: Seat, config: Megatron | None = None
    ) -> None:
        assert seat.groups is not None
        self._spec, self._head, self._config = model, head, config or Megatron()
        self.layout, self.rank, self.groups, self._seat = seat.layout, seat.rank, seat.groups, seat
        self._at, self._device = seat.layout.coordinate(seat.rank), seat.device
        source_config = read_config(model)
        check_layout(source_config, seat.layout, head=head, settings=self._config)
        self.conversion = Conversion(source_config, head=head, vocabulary_multiple=seat.layout.t)
        self.stages = even_stages(source_config.num_hidden_layers, seat.layout.p, chunks=self._config.chunks)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            keep_freed_memory()
        self._scope = Scope(seat.groups, device=self._device)
        with self._scope.entered():
            self._build()
        self._offloaded = OffloadedParts(model.path, device=self._device)
        if not model.trains:
            self._offloaded.drop_gradients(self._tensors)
        self._weights = Weights(self.conversion, self.stages, seat=seat, optimizer=self._optimizer)
        self._weights.load(model)
        self._hybrid: HybridEngine | None = None

    def infer(
        self, rows: TensorDict, *, temperature: float, asked: Asked = PLAIN, keep: bool = False
    ) -> TensorDict:
        """See `TrainEngine.infer`; zeros on stages before the last."""
        self._offloaded.refuse("parameters")
        results = zero_outputs(rows, head=self._head, asked=asked)
        parts = self._plan(rows)

        def outputs_of(output: Tensor, packed: PackedRows, part: Rows) -> tuple[None, object]:
            outputs = self._outputs(output, packed, part, temperature=temperature, asked=asked)
            return None, {name: values.cpu() for name, values in outputs.items()}

        make = partial(self._packed, rows, also=asked.columns)
        with torch.no_grad(), self._scope.entered():
            found = self._pipeline.run(parts, make, outputs_of, backward=False)
        for index, outputs in zip(parts, found, strict=False):
            for name, values in results.items() if index else ():
                values[index] = cast(Rows, outputs)[name]
        return TensorDict(results, batch_size=rows.batch_size)

    def accumulate(
        self, rows: TensorDict, loss: Loss, counts: Counts, *, temperature: float
    ) -> dict[str, Tensor]:
        """See `TrainEngine.accumulate`; returns metrics only on ranks that give output."""
        self._offloaded.refuse(*PARTS[:2])
        parts, self.accumulated = self._plan(rows, loss), True

        def loss_of(output: Tensor, packed: PackedRows, part: Rows) -> tuple[Tensor, object]:
            outputs = self._outputs(output, packed, part, temperature=temperature, asked=Asked.by(loss))
            value, metrics = run_loss(loss, outputs, part, counts)
            return value, {name: metric.detach().clone() for name, metric in metrics.items()}

        for run in self._runs:
            run.train()  # recomputation is for training mode only
        with self._scope.entered():
            make = partial(self._packed, rows, loss=loss)
            found = self._pipeline.run(parts, make, loss_of, backward=True)
        for run in self._runs:
            run.eval()
        totals: dict[str, Tensor] = {}
        for metrics in found if self._seat.gives_output else ():
            for name, metric in cast(Rows, metrics).items():
                totals[name] = totals.get(name, 0.0) + metric
        return {name: total.cpu() for name, total in totals.items()}

    def optimizer_step(self) -> dict[str, float]:
        """See `TrainEngine.optimizer_step`."""
        self._offloaded.refuse(*PARTS)
        with self._scope.entered():
            finalize_model_grads(self._wrapped, None, pg_collection=self._scope.collection)
            report = self._adamw.step()
            for run in self._wrapped:
                run.zero_grad_buffer()
        self.accumulated, self.version = False, self.version + 1
        return report

    def generating(self) -> AbstractContextManager[Decoder]:
        """See `TrainEngine.generating`."""
        self._offloaded.refuse("parameters")
        if self._config.distributed_optimizer:
            return self._from_views()
        return self._in_place().generating()

    def lending(self) -> AbstractContextManager[Shard] | None:
        """See `TrainEngine.lending`; nothing is lent where several ranks share a key-value head."""
        self._offloaded.refuse("parameters")
        generating = self.layout.generating
        held = generating.rule == "hybridflow" and not self._config.distributed_optimizer
        return self._in_place().lending() if held and not self.conversion.groups % generating.t else None

    def _in_place(self) -> HybridEngine:
        self._hybrid = self._hybrid or self._hybrid_of(self.shards)
        return self._hybrid

    @contextmanager
    def _from_views(self) -> Iterator[Decoder]:
        """With a distributed optimizer: views may leave Megatron's buffer, its parameters may not."""
        hybrid = self._hybrid_of({name: nn.Parameter(p.detach()) for name, p in self.shards.items()})
        with hybrid.generating() as decoder:
            self._last = hybrid.last
            try:
                yield decoder
            finally:
                del decoder  # must not outlive the context, which frees its tensors

    def _hybrid_of(self, parameters: Mapping[str, nn.Parameter]) -> HybridEngine:
        return HybridEngine(self.conversion, self.stages, seat=self._seat, parameters=parameters)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights`."""
        self._offloaded.refuse("parameters")
        return self._weights.gathered(lambda name: self.shards[name].detach())

    def transition(self) -> Transition:
        """See `TrainEngine.transition`."""
        return self._hybrid.last if self._hybrid else self._last

    def save(self, directory: Path) -> None:
        """See `TrainEngine.save`; the files are those of the FSDP engine."""
        self._offloaded.refuse("parameters", "optimizer")
        save(directory, self._weights, self._adamw, seat=self._seat)

    def load(self, directory: Path, *, trained: bool = True) -> None:
        """See `TrainEngine.load`."""
        self._offloaded.refuse("parameters", "optimizer")
        load(directory, self._weights, self._adamw, trained=trained)
        self.version += 1

    def export(self, directory: Path) -> None:
        """See `TrainEngine.export`."""
        whole = {name: value.cpu() for name, value in self.weights() if self.rank == 0}
        if self.rank == 0:
            empty = empty_model(self.conversion.config, self._head)
            export_model(directory, whole, like=empty, spec=self._spec)
        wait(self._seat)

    def give_weights(self, *, wanted: bool = True) -> Tensor:
        """See `TrainEngine.give_weights`."""
        self._offloaded.refuse(*self._master_parts)
        size = sum(shape.numel() for shape in self._weights.shapes.values())
        found = torch.empty(size if wanted else 0)
        places = self._weights.in_order(found, path=self._spec.path) if wanted else {}
        for name, value in self._weights.gathered(self._optimizer.read):
            if wanted:
                places[name].copy_(value)
        return found

    def follow_weights(self, weights: Tensor, *, decay: float) -> None:
        """See `TrainEngine.follow_weights`."""
        self._offloaded.refuse(*self._master_parts)
        theirs = self._weights.in_order(weights, path=self._spec.path)
        for param in self._weights.held:
            own = self._optimizer.read(param.name).clone()
            self._weights.fill(param, theirs.__getitem__)
            self._optimizer.write(param.name, self._optimizer.read(param.name).lerp(own, decay))
        self.version += 1

    def _build(self) -> None:
        """Make the runs of layers, the buffers of their gradients, the optimizer and the pipeline."""
        spec, settings, conversion = self._spec, self._config, self.conversion
        config = transformer_config(
            conversion,
            self.layout,
            settings,
            dtype=getattr(torch, spec.computes_in),
            device=self._device,
            recompute=spec.gradient_checkpointing,
        )
        collection = self._scope.collection
        runs = even_stages(conversion.config.num_hidden_layers, self.layout.p * settings.chunks)
        self._runs = [
            Run(config, conversion, numbers, chunk=chunk, collection=collection).eval()
            for chunk, numbers in enumerate(runs[self._at.p :: self.layout.p])
        ]
        named = {run.whole_name(name): p for run in self._runs for name, p in run.named_parameters()}
        self.shards: dict[str, nn.Parameter] = {
            param.name: named[param.name] for param in conversion.parameters if param.name in named
        }
        for param in conversion.parameters:
            if param.name in named:
                mark(named[param.name], param)
        memory = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=settings.distributed_optimizer
        )
        self._wrapped = [
            DistributedDataParallel(config, memory, run, pg_collection=collection)
            for run in self._runs
            if spec.weights_change
        ]
        self._optimizer = (
            ShardedAdamW(self.shards, self._wrapped, spec.optimizer, groups=self.groups)
            if spec.weights_change
            else FrozenParameters(self.shards)
        )
        self._pipeline = Pipeline(self._wrapped or self._runs, config, collection)

    def _plan(self, rows: TensorDict, loss: Loss | None = None) -> list[list[int]]:
        """Row numbers of each micro-batch; empty ones make their number a multiple of the pipeline's."""
        check_same_rows(rows, self.groups.replica, device=self._device)
        parts = plan(rows, self._config.micro_batch_tokens(on_cpu=self._device.type == "cpu"), loss)
        return parts + [[] for _ in range(-len(parts) % self._pipeline.multiple)]

    def _packed(
        self, rows: TensorDict, index: list[int], loss: Loss | None = None, also: Sequence[str] = ()
    ) -> tuple[Rows, PackedRows]:
        part = select(rows, index, loss, device=self._device, also=also)
        return part, pack(part, place="after" if self._head == "reward" else "before")

    def _outputs(
        self, output: Tensor, packed: PackedRows, rows: Rows, *, temperature: float, asked: Asked
    ) -> dict[str, Tensor]:
        if self._head != "lm":
            return {"values": packed.unpack(output[:, 0])}
        words = Vocabulary(self.conversion.config.vocab_size, self.groups.tensor)
        return said(output, packed, rows, words=words, temperature=temperature, asked=asked)

    @property
    def _adamw(self) -> ShardedAdamW:
        """The optimizer of a model that trains."""
        assert isinstance(self._optimizer, ShardedAdamW)
        return self._optimizer

    @property
    def _master_parts(self) -> tuple[Part, ...]:
        """The parts that hold the masters."""
        return ("parameters", "optimizer") if self._optimizer.copies else ("parameters",)

    def _tensors(self, part: Part) -> list[Tensor]:
        """See `TrainEngine._tensors`; separate masters count as the optimizer's."""
        if part == "parameters":
            return list(self.shards.values())
        if part == "gradients":
            return [buffer.grad_data for run in self._wrapped for buffer in run.buffers]
        return self._optimizer.tensors()
