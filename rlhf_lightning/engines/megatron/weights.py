"""Fills one rank's shards from a whole Hugging Face model, and collects whole parameters from the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from rlhf_lightning.engines.conversion import OUTPUT, Conversion, Read
from rlhf_lightning.engines.exchange import split_flat
from rlhf_lightning.engines.huggingface.adapter_files import HEAD
from rlhf_lightning.engines.huggingface.models import empty_model, fresh_head, headless, load_model
from rlhf_lightning.engines.huggingface.source import check_model, resolve, weight_files
from rlhf_lightning.engines.megatron.optimizer import FrozenParameters, ShardedAdamW
from rlhf_lightning.engines.tensor_files import read_header
from rlhf_lightning.parallel.sharding import Sharded, holds
from rlhf_lightning.parallel.world import Seat
from rlhf_lightning.spec import ModelSpec


class Weights:
    """Reads and writes one rank's shards of masters and moments as parts of the whole model.

    Args:
        conversion: names and shapes of the model.
        stages: the layers of each stage.
        seat: this rank's place.
        optimizer: holds the masters and moments.
    """

    def __init__(
        self,
        conversion: Conversion,
        stages: Sequence[Sequence[int]],
        *,
        seat: Seat,
        optimizer: ShardedAdamW | FrozenParameters,
    ) -> None:
        assert seat.groups is not None
        self.conversion, self._groups, self._optimizer = conversion, seat.groups, optimizer
        self._stages = stages
        self._t, self._at = seat.layout.t, seat.layout.coordinate(seat.rank)
        self.held = [param for param in conversion.parameters if holds(param, stages, self._at.p)]
        """The parameters of this rank's stage."""
        skeleton = empty_model(conversion.config, conversion.head)
        self.shapes = {name: p.shape for name, p in skeleton.named_parameters()}
        """Shapes of the whole model's parameters by Hugging Face name, in Hugging Face's order."""

    def load(self, spec: ModelSpec) -> None:
        """Set this rank's shards from the directory of the model.

        Raises:
            ValueError: the directory cannot be loaded.
        """
        names = [name for param in self.held for name in self.conversion.names(param.name)]
        read = _source(spec, self.conversion, names)
        for param in self.held:
            self.fill(param, read)

    def fill(self, param: Sharded, read: Read, moment: str | None = None) -> None:
        """Set this rank's shard of a parameter, or of a moment, from the whole model's.

        Raises:
            ValueError: the weights have other shapes.
        """
        try:
            whole = self.conversion.from_hugging_face(param, read)
            assert tuple(whole.shape) == param.shape
        except (RuntimeError, AssertionError) as err:
            names = self.conversion.names(param.name)
            found = [tuple(read(name).shape) for name in names]
            raise ValueError(
                f"{' and '.join(names)} of shape {found}: do not make {param.name} of shape {param.shape}. "
                "The weights do not fit config.json: copy the directory again."
            ) from err
        self._optimizer.write(param.name, param.shard(whole, self._t, self._at.t), moment)

    def collect(self, param: Sharded, shard: Tensor, *, target: int | None = None) -> dict[str, Tensor]:
        """Gather a whole parameter, by Hugging Face name; all tensor ranks of its stage call it.

        Args:
            param: held by this rank.
            shard: this rank's part of it, or of a tensor of the same shape, such as a moment.
            target: the tensor rank that gets it; None: all.

        Returns:
            The parameter's Hugging Face tensors; empty on ranks that do not get it.
        """
        wanted = target in (None, self._at.t)
        if param.dim is None or self._t == 1:
            return self.conversion.to_hugging_face(param, shard) if wanted else {}
        shard = shard.contiguous()
        shards = [torch.empty_like(shard) for _ in range(self._t)] if wanted else None
        if target is None:
            dist.all_gather(shards, shard, group=self._groups.tensor)
        else:
            dist.gather(shard, shards, group=self._groups.tensor, group_dst=target)
        return self.conversion.to_hugging_face(param, param.whole(shards)) if shards else {}

    def gathered(self, shard_of: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Gather all parameters one by one on every rank of a replica, as (Hugging Face name, tensor).

        Args:
            shard_of: returns this rank's part of a parameter.
        """
        group, like = self._groups.pipeline, shard_of(self.held[0].name)
        for param in self.conversion.parameters:
            owner = self.owner(param)
            found = self.collect(param, shard_of(param.name)) if owner == self._at.p else {}
            for name in self.conversion.names(param.name):
                value = found[name].contiguous() if found else like.new_empty(self.shapes[name])
                if group.size() > 1:
                    dist.broadcast(value, group=group, group_src=owner)
                yield name, value

    def owner(self, param: Sharded) -> int:
        """The first stage that holds a parameter: a tied embedding is on the first and the last."""
        return next(stage for stage in range(len(self._stages)) if holds(param, self._stages, stage))

    def in_order(self, weights: Tensor, *, path: str) -> dict[str, Tensor]:
        """Views of a flat vector of all weights as the parameters of the Hugging Face model, by name.

        Args:
            weights: [N], all weights in the order of the Hugging Face model.
            path: of this model, for messages.

        Raises:
            ValueError: they are the weights of another architecture.
        """
        parts = split_flat(weights, [shape.numel() for shape in self.shapes.values()], path=path)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}


def _source(spec: ModelSpec, conversion: Conversion, names: Sequence[str]) -> Read:
    """A function that returns parameters in float32, read one by one from the files if they have these names.

    Otherwise the whole model is loaded. A head that is not in the files is fresh.

    Raises:
        ValueError: the directory cannot be loaded, or its weights have no head and nothing would train one.
    """
    directory = resolve(spec)
    check_model(spec)
    files = {name: file for file in weight_files(directory) for name in read_header(file)}
    lacking = set(names) - files.keys()
    both = conversion.tied and conversion.names(OUTPUT)[0] in files  # a whole model knows whether they differ
    if not lacking and not both:
        return lambda name: _read(files[name], name)
    if lacking == {HEAD}:
        if not spec.weights_change:
            raise headless(spec)
        head = fresh_head(conversion.config.hidden_size, seed=spec.init_seed or 0)
        return lambda name: head if name == HEAD else _read(files[name], name)
    _, model = load_model(spec, conversion.head)
    loaded = {name: p.detach() for name, p in model.named_parameters()}
    return loaded.__getitem__


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor.float()
