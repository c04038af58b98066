"""The FSDP engine: a Hugging Face decoder, whole on each device or sharded with FSDP2 over a group's ranks.

Its layers may also be divided over tensor ranks, which get the same rows.

    rows -> micro-batches of a token budget -> packed without padding -> decoder -> [n, R] -> loss
         -> gradients summed over micro-batches and ranks -> clipped AdamW step
Ranks that shard the weights compute the same number of micro-batches (`Passes`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_lightning.engines.checkpoint import CheckpointReader, read_state, save_checkpoint
from rlhf_lightning.engines.dtensor import gather
from rlhf_lightning.engines.exchange import average_weights, copy_weights, flattened
from rlhf_lightning.engines.fsdp.compilation import compile_layers, uncompiled
from rlhf_lightning.engines.fsdp.config import FSDP
from rlhf_lightning.engines.fsdp.mesh import Mesh, model_mesh
from rlhf_lightning.engines.fsdp.replica import Replica
from rlhf_lightning.engines.fsdp.shards import Shards, layers_of
from rlhf_lightning.engines.head import PLAIN, Asked, Head
from rlhf_lightning.engines.host_linear import use_host_linears
from rlhf_lightning.engines.host_memory import keep_freed_memory
from rlhf_lightning.engines.huggingface.adapter_files import export_adapters, is_factor
from rlhf_lightning.engines.huggingface.adapters import (
    adapters_off,
    check_lora,
    lora_state,
    merged,
)
from rlhf_lightning.engines.huggingface.models import export_gathered, load_model, recomputing
from rlhf_lightning.engines.huggingface.tensor_plan import check_plan
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.engines.native.fused import can_fuse, decoder_of
from rlhf_lightning.engines.offload import PARTS, OffloadedParts, Part
from rlhf_lightning.engines.optimizer import ClippedAdamW
from rlhf_lightning.engines.packed.kept_passes import KeptPasses
from rlhf_lightning.engines.packed.last_mlp import shorten_last_mlp
from rlhf_lightning.engines.packed.passes import Passes
from rlhf_lightning.engines.packed.record import Record
from rlhf_lightning.engines.packed.same_rows import check_same_rows
from rlhf_lightning.engines.training import TrainEngine
from rlhf_lightning.functional.aggregate import Counts, Loss
from rlhf_lightning.parallel.groups import if_several
from rlhf_lightning.spec import ModelSpec

__all__ = ["FSDP", "FSDPEngine"]


class FSDPEngine(TrainEngine):
    """See the head of the module.

    Args:
        model: what to load, and how to optimise it.
        head: what the model computes per response token.
        group: data-parallel ranks, with rows of their own; None for one.
        tensor: tensor-parallel ranks, with the same rows; None for one.
        device: of this rank.
        config: options of the engine.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        head: Head = "lm",
        group: dist.ProcessGroup | None = None,
        tensor: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        config: FSDP | None = None,
    ) -> None:
        self._spec, self._head, self._config = model, head, config or FSDP()
        self._device, data, self._tensor = torch.device(device), if_several(group), if_several(tensor)
        self._root, self._model = load_model(model, head)
        self._dtype: torch.dtype = getattr(torch, model.computes_in)
        mesh = self._mesh(data)
        self._group = mesh.everyone if mesh else data
        self._config.check_ranks(1 if data is None else dist.get_world_size(data))
        self._weights = self._prepare(mesh, data)
        self._optimizer = ClippedAdamW(self._weights.masters, model.optimizer, group=self._weights.group)
        self._record = self._make_record() if mesh is None else None
        self._passes = self._make_passes(data if mesh else None)  # unsharded copies need not wait
        self._offloaded = OffloadedParts(model.path, device=self._device)

    def infer(
        self, rows: TensorDict, *, temperature: float, asked: Asked = PLAIN, keep: bool = False
    ) -> TensorDict:
        """See `TrainEngine.infer`."""
        self._offloaded.refuse("parameters")
        check_same_rows(rows, self._tensor, device=self._device)
        with recomputing(self._root, wanted=keep and self._spec.gradient_checkpointing):
            results = self._passes.infer(rows, temperature=temperature, asked=asked, keep=keep)
        self._weights.after_forward()
        return results

    def accumulate(
        self, rows: TensorDict, loss: Loss, counts: Counts, *, temperature: float
    ) -> dict[str, Tensor]:
        """See `TrainEngine.accumulate`."""
        self._offloaded.refuse(*PARTS[:2])
        check_same_rows(rows, self._tensor, device=self._device)
        self.accumulated = True
        backward = self._weights.backward
        with recomputing(self._root, wanted=self._spec.gradient_checkpointing):
            return self._passes.accumulate(rows, loss, counts, temperature=temperature, backward=backward)

    def free_kept(self) -> None:
        """See `TrainEngine.free_kept`."""
        self._passes.forget()

    def optimizer_step(self) -> dict[str, float]:
        """See `TrainEngine.optimizer_step`."""
        self._offloaded.refuse(*PARTS)
        self._weights.sync_gradients()
        report = self._optimizer.step()
        self.accumulated = False
        self._changed()
        return report

    @contextmanager
    def generating(self) -> Iterator[Decoder]:
        """See `TrainEngine.generating`."""
        started = time.perf_counter()
        with self.gathered() as module, uncompiled() if self._config.compile_layers else nullcontext():
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._last = self._weights.transition(time.perf_counter() - started)
            yield decoder_of(module, self._record)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights`."""
        self._offloaded.refuse("parameters")
        return self._merged(self._dtype) if self._spec.lora else self._weights.whole()

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `TrainEngine.take_weights`; only of a model that is on one device."""
        self._offloaded.refuse("parameters")
        if self._group is not None:
            raise NotImplementedError("FSDPEngine takes weights from other engines only on one device.")
        copy_weights(self._weights.stored, weights, path=self._spec.path)
        self._changed()

    def without_adapters(self) -> AbstractContextManager[None]:
        """Within this context the base model computes, without adapters."""
        return adapters_off(self._root)

    def gathered(self) -> AbstractContextManager[PreTrainedModel]:
        """Gather the whole model, in the dtype of the computation, as a Hugging Face module to read.

        Its attention asks for `sequences`, as `packed.packing.pack` makes them of rows.
        """
        self._offloaded.refuse("parameters")
        return self._weights.gathered()

    def save(self, directory: Path) -> None:
        """See `TrainEngine.save`."""
        self._offloaded.refuse("parameters", "optimizer")
        state = self._optimizer.state() | lora_state(self._spec.lora)
        save_checkpoint(directory, self._saved() | self._optimizer.tensors(), state, group=self._group)

    def load(self, directory: Path, *, trained: bool = True) -> None:
        """See `TrainEngine.load`."""
        self._offloaded.refuse("parameters", "optimizer")
        check_lora(directory, self._spec.lora)
        tensors = self._saved()
        state = read_state(directory, {name: tensor.shape for name, tensor in tensors.items()})
        if trained:
            self._optimizer.restore(state)  # makes the moments that are filled
            tensors |= self._optimizer.tensors()
        CheckpointReader(directory).fill(tensors, group=self._group)
        self._changed()

    def export(self, directory: Path) -> None:
        """See `TrainEngine.export`."""
        export_gathered(directory, self.weights(), like=self._model, spec=self._spec, group=self._group)

    def export_adapters(self, directory: Path) -> None:
        """Write only the adapters, in peft's format; from one process."""
        self._offloaded.refuse("parameters")
        export_adapters(directory, self._weights.stored, like=self._model, spec=self._spec)

    def give_weights(self, *, wanted: bool = True) -> Tensor:
        """See `TrainEngine.give_weights`."""
        self._offloaded.refuse("parameters")
        stored = self._weights.stored
        parameters = self._merged(torch.float32) if self._spec.lora else stored.items()
        size = sum(weight.numel() for name, weight in stored.items() if not is_factor(name))
        return flattened((gather(weight) for _, weight in parameters), size=size if wanted else 0)

    def follow_weights(self, weights: Tensor, *, decay: float) -> None:
        """See `TrainEngine.follow_weights`."""
        self._offloaded.refuse("parameters")
        average_weights(self._weights.masters, weights, decay=decay, path=self._spec.path)
        self._changed()

    def offload(self, parts: Iterable[Part]) -> None:
        """See `TrainEngine.offload`; also frees what `infer` and a generation kept."""
        self._passes.forget()
        super().offload(parts)

    def _changed(self) -> None:
        self._passes.forget()
        self._weights.refresh()
        self.version += 1

    def _mesh(self, data: dist.ProcessGroup | None) -> Mesh | None:
        if self._tensor is None and (data is None or self._config.shard == 1):
            return None
        check_plan(self._model, 1 if self._tensor is None else dist.get_world_size(self._tensor))
        return model_mesh(data, self._tensor, shard=self._config.shard, device=self._device)

    def _prepare(self, mesh: Mesh | None, data: dist.ProcessGroup | None) -> Replica | Shards:
        layers = layers_of(self._model)
        weights = self._distribute(mesh, data)
        if self._config.compile_layers:
            compile_layers(layers)
        else:
            shorten_last_mlp(layers)
        return weights

    def _distribute(self, mesh: Mesh | None, data: dist.ProcessGroup | None) -> Replica | Shards:
        if self._device.type == "cuda":
            torch.cuda.set_device(torch.empty(0, device=self._device).device)  # "cuda" has no index
        else:
            keep_freed_memory()
            use_host_linears(self._root)
        if not self._spec.weights_change:
            self._root.requires_grad_(False)
        if mesh is None:
            nn.Module.to(self._root, self._device)
            return Replica(self._model, dtype=self._dtype, copies=data)
        on_cpu = self._device.type == "cpu"
        return Shards(
            self._root,
            self._model,
            mesh=mesh,
            dtype=self._dtype,
            reshard=self._config.reshards(on_cpu=on_cpu),
            defer=self._config.defers(on_cpu=on_cpu),
        )

    def _make_passes(self, data: dist.ProcessGroup | None) -> Passes:
        return Passes(
            self._root,
            head=self._head,
            group=data,
            device=self._device,
            budget=self._config.micro_batch_tokens(on_cpu=self._device.type == "cpu"),
            kept=KeptPasses(self._config.kept_tokens if self._spec.trains else 0, self._record),
        )

    def _make_record(self) -> Record | None:
        """A record of the products of generations, where updates can use it and are faster with it."""
        spec, tokens = self._spec, self._config.kept_tokens
        unusable = self._config.compile_layers or spec.gradient_checkpointing or not spec.trains
        # In bfloat16 recording and looking up takes as long as the products do.
        useful = tokens and self._head == "lm" and self._dtype == torch.float32 and not unusable
        useful = useful and self._device.type == "cpu"  # a GPU replays graphs, which record nothing
        return Record(self._model, tokens) if useful and can_fuse(self._model) else None

    def _merged(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        assert self._spec.lora is not None
        return merged(self._model, self._weights.stored, self._spec.lora, dtype=dtype)

    def _tensors(self, part: Part) -> list[Tensor]:
        masters = list(self._weights.masters.values())
        if part == "parameters":
            return [*masters, *self._weights.beside_masters()]
        if part == "gradients":
            return [master.grad for master in masters if master.grad is not None]
        return list(self._optimizer.tensors().values())

    def _saved(self) -> dict[str, Tensor]:
        """The weights that a checkpoint holds, by their names there."""
        return {f"model.{name}": master.detach() for name, master in self._weights.masters.items()}
