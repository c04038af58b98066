"""The DeepSpeed engine: a Hugging Face decoder whose training state is sharded by ZeRO.

    rows -> micro-batches of a token budget -> packed without padding -> decoder -> [n, R] -> loss
         -> DeepSpeed reduces gradients, clips them and steps (ZeRO 1, 2 or 3)
All ranks compute the same number of micro-batches (`Passes`), since stages 2 and 3 reduce after each of them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_lightning.engines.deepspeed.config import ZeRO
from rlhf_lightning.engines.deepspeed.gathered import Gathering
from rlhf_lightning.engines.deepspeed.masters import Masters
from rlhf_lightning.engines.deepspeed.scope import DeepSpeedConfig, Scope, ZeROModule, free
from rlhf_lightning.engines.deepspeed.state import load, save
from rlhf_lightning.engines.exchange import flattened, split_flat
from rlhf_lightning.engines.head import PLAIN, Asked, Head
from rlhf_lightning.engines.host_memory import keep_freed_memory
from rlhf_lightning.engines.huggingface.models import export_gathered, load_model, recomputing
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.engines.native.fused import decoder_of
from rlhf_lightning.engines.offload import PARTS, OffloadedParts, Part, size_bytes
from rlhf_lightning.engines.optimizer import Counters, adamw
from rlhf_lightning.engines.packed.passes import Passes
from rlhf_lightning.engines.training import TrainEngine, Transition
from rlhf_lightning.functional.aggregate import Counts, Loss
from rlhf_lightning.parallel.world import Seat
from rlhf_lightning.spec import ModelSpec


class ZeROEngine(TrainEngine):
    """See the head of the module.

    Args:
        model: what to load, and how to optimise it.
        head: what the model computes per response token.
        seat: this rank's place, with all its groups.
        config: options of the engine.

    Raises:
        ValueError: the model cannot be loaded, or the layout divides it into stages or tensor shards.
    """

    def __init__(self, model: ModelSpec, *, head: Head = "lm", seat: Seat, config: ZeRO) -> None:
        self._spec, self._head, self._config = model, head, config
        self._config.check(model, head, seat.layout)
        assert seat.groups is not None
        self._group, self._device = seat.groups.data, seat.device
        self._ranks = dist.get_world_size(self._group)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            keep_freed_memory()
        self._scope = Scope(self._group, device=self._device)
        self._build()
        self._passes = Passes(
            self._module,
            head=head,
            group=self._group if self._ranks > 1 else None,
            device=self._device,
            budget=self._config.micro_batch_tokens(on_cpu=self._device.type == "cpu"),
        )
        self._offloaded = OffloadedParts(model.path, device=self._device)
        if not model.trains:
            self._offloaded.drop_gradients(self._tensors)
        self._counters = Counters(model.optimizer)

    def infer(
        self, rows: TensorDict, *, temperature: float, asked: Asked = PLAIN, keep: bool = False
    ) -> TensorDict:
        """See `TrainEngine.infer`."""
        self._offloaded.refuse("parameters")
        with self._scope.entered():
            results = self._passes.infer(rows, temperature=temperature, asked=asked)
            if self._config.stage == 3:  # it may have prefetched layers for a backward pass
                self._module.optimizer.empty_partition_cache()
        return results

    def accumulate(
        self, rows: TensorDict, loss: Loss, counts: Counts, *, temperature: float
    ) -> dict[str, Tensor]:
        """See `TrainEngine.accumulate`."""
        self._offloaded.refuse(*PARTS[:2])
        self.accumulated = True
        with recomputing(self._module, wanted=self._spec.gradient_checkpointing), self._scope.entered():
            return self._passes.accumulate(
                rows, loss, counts, temperature=temperature, backward=self._backward
            )

    def optimizer_step(self) -> dict[str, float]:
        """See `TrainEngine.optimizer_step`; the norm of a skipped step is inf."""
        self._offloaded.refuse(*PARTS)
        self._counters.set_rate(self._adamw)
        with self._scope.entered():
            self._module.step()
        stepped = bool(self._module.was_step_applied())
        self.version += stepped
        self.accumulated = False
        if not stepped:
            self._masters.forget_gradients()
        return self._counters.count(float(self._module.get_global_grad_norm()), stepped=stepped)

    @contextmanager
    def generating(self) -> Iterator[Decoder]:
        """See `TrainEngine.generating`; the whole model is gathered bucket by bucket, and freed on exit."""
        start = time.perf_counter()
        with self.gathered() as module:
            training = size_bytes(self._tensors("parameters"))
            self._last = Transition(
                seconds=time.perf_counter() - start,
                received_bytes=self._gathering.received_bytes,
                training_bytes=training,
                generation_bytes=size_bytes([*self._tensors("parameters"), *module.parameters()]),
            )
            yield decoder_of(module)

    def gathered(self) -> AbstractContextManager[PreTrainedModel]:
        """Gather the whole model, in the dtype of the computation, as a Hugging Face module to read.

        Its attention asks for `sequences`, as `packed.packing.pack` makes them of rows.
        """
        self._offloaded.refuse("parameters")
        return self._gathering.gathered()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights`."""
        self._offloaded.refuse("parameters")
        return self._gathering.whole()

    def save(self, directory: Path) -> None:
        """See `TrainEngine.save`; the files are those of the FSDP engine."""
        self._offloaded.refuse("parameters", "optimizer")
        save(directory, self._masters, self._counters, group=self._group)

    def load(self, directory: Path, *, trained: bool = True) -> None:
        """See `TrainEngine.load`."""
        self._offloaded.refuse("parameters", "optimizer")
        load(directory, self._masters, self._counters, trained=trained)
        self._changed()

    def export(self, directory: Path) -> None:
        """See `TrainEngine.export`."""
        export_gathered(directory, self.weights(), like=self._model, spec=self._spec, group=self._group)

    def give_weights(self, *, wanted: bool = True) -> Tensor:
        """See `TrainEngine.give_weights`."""
        self._offloaded.refuse("parameters", "optimizer")
        shapes = self._masters.shapes
        size = sum(shape.numel() for shape in shapes.values())
        return flattened((self._masters.read(name) for name in shapes), size=size if wanted else 0)

    def follow_weights(self, weights: Tensor, *, decay: float) -> None:
        """See `TrainEngine.follow_weights`."""
        self._offloaded.refuse("parameters", "optimizer")
        shapes = self._masters.shapes
        parts = split_flat(weights, [shape.numel() for shape in shapes.values()], path=self._spec.path)
        for name, part in zip(shapes, parts, strict=True):
            self._masters.lerp(name, part, weight=1 - decay)
        self._changed()

    def _build(self) -> None:
        """Load the model and let DeepSpeed shard it."""
        spec, on_cpu = self._spec, self._device.type == "cpu"
        root, model = load_model(spec, self._head)
        self._model = model
        if spec.computes_in == "float32":
            root.float()  # DeepSpeed would compute in the dtype of the files
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._device)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        config = self._config.for_deepspeed(
            spec, numbers=sum(shape.numel() for shape in shapes.values()), on_cpu=on_cpu
        )
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        # DeepSpeed makes masters of weights rounded to bfloat16: the originals are written to them below.
        originals = {n: p.detach() for n, p in self._parameters.items() if spec.computes_in != "float32"}
        self._gathering = Gathering(model, scope=self._scope, bucket=self._config.bucket_numbers)
        self._adamw = adamw(self._parameters.values(), spec.optimizer, fused=True)
        with self._scope.entered():
            self._module = ZeROModule(
                args=None,
                model=root,
                optimizer=self._adamw,
                mpu=self._scope.ranks,
                config=config,
                config_class=DeepSpeedConfig(config, self._scope.ranks),
                dont_change_device=self._config.stage == 3,  # it is sharded first, then moved shard by shard
            )
        self._module.eval()
        weakref.finalize(self, free, self._module, list(self._parameters.values())).atexit = False
        self._masters = Masters(self._module, self._parameters, shapes, adamw=self._adamw, group=self._group)
        for name, values in originals.items():
            self._masters.write(name, values)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch's loss, summed over the ranks; DeepSpeed takes their mean."""
        self._module.backward(loss * self._ranks)

    def _changed(self) -> None:
        with self._scope.entered():
            self._masters.refresh()
        self.version += 1

    def _tensors(self, part: Part) -> list[Tensor]:
        """See `TrainEngine._tensors`; masters count as the optimizer's, buckets do not count."""
        parameters = self._parameters.values()
        if part == "optimizer":
            return self._masters.tensors()
        if part == "parameters":
            shards = [getattr(p, "ds_tensor", p) for p in parameters]
            return [*(p.detach() for p in parameters), *(shard.detach() for shard in shards)]
        return self._masters.gradients()
