"""One rank's shards as parts of the whole model, under the names of Hugging Face, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_lightning.engines.conversion import Conversion, Read
from rlhf_lightning.engines.exchange import split_flat
from rlhf_lightning.engines.huggingface.adapters import HEAD
from rlhf_lightning.engines.huggingface.models import check_model, fresh_head, load_causal_lm, load_scalar
from rlhf_lightning.engines.huggingface.source import resolve, weight_files
from rlhf_lightning.engines.megatron.optimizer import ShardedAdamW, Unchanging
from rlhf_lightning.parallel.sharding import Sharded, holds
from rlhf_lightning.parallel.world import Seat
from rlhf_lightning.spec import ModelSpec


class Weights:
    """The masters and moments of one rank's shards.

    Args:
        conversion: of the model.
        stages: layers of each stage.
        seat: of this rank.
        optimizer: that holds them.
    """

    def __init__(
        self,
        conversion: Conversion,
        stages: Sequence[Sequence[int]],
        *,
        seat: Seat,
        optimizer: ShardedAdamW | Unchanging,
    ) -> None:
        assert seat.groups is not None
        self.conversion, self._groups, self._optimizer = conversion, seat.groups, optimizer
        self._stages = stages
        self._t, self._at = seat.layout.t, seat.layout.coordinate(seat.rank)
        self.held = [param for param in conversion.parameters if holds(param, stages, self._at.p)]
        """Those of this rank's stage."""
        with torch.device("meta"):
            skeleton = empty_model(conversion)
        self.shapes = {name: p.shape for name, p in skeleton.named_parameters()}
        """Of the whole model, by name and in the order of Hugging Face."""

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
        """Set this rank's shard of a parameter, or its moment, from the whole model's.

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
        """A whole parameter by Hugging Face name; all tensor ranks of its stage call it.

        Args:
            param: held by this rank.
            shard: this rank's part of it, or of something of the same shape.
            target: tensor rank that wants it; None: all.

        Returns:
            Nothing on ranks that do not want it.
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

    def everything(self, shard_of: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All parameters of the model by Hugging Face name, one after the other, on every rank of a replica.

        Args:
            shard_of: gives this rank's part of a parameter.
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
        """The stage that speaks for a parameter: of a tied embedding the last one has a copy."""
        return next(stage for stage in range(len(self._stages)) if holds(param, self._stages, stage))

    def in_order(self, weights: Tensor, *, path: str) -> dict[str, Tensor]:
        """Views of one number behind the other, in the order of the Hugging Face model.

        Args:
            weights: [N], all of them.
            path: of this model, for messages.

        Raises:
            ValueError: they are of another architecture.
        """
        parts = split_flat(weights, [shape.numel() for shape in self.shapes.values()], path=path)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}


def empty_model(conversion: Conversion) -> PreTrainedModel:
    """The Hugging Face module of the model with whatever is in its memory, or none on the meta device."""
    config = conversion.config
    if conversion.head == "lm":
        return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    config.num_labels = 1
    return cast(PreTrainedModel, AutoModelForSequenceClassification.from_config(config))


def _source(spec: ModelSpec, conversion: Conversion, names: Sequence[str]) -> Read:
    """Gives parameters in float32: one by one from the files, where they hold these names, else of a model.

    A head that the files lack is fresh.

    Raises:
        ValueError: the directory cannot be loaded.
    """
    directory = resolve(spec)
    check_model(spec)
    files = _files(directory)
    lacking, lm = set(names) - files.keys(), conversion.head == "lm"
    if not lacking:
        return lambda name: _read(files[name], name)
    if lacking == {HEAD} and not lm:
        head = fresh_head(conversion.config.hidden_size, seed=spec.init_seed or 0)
        return lambda name: head if name == HEAD else _read(files[name], name)
    model = load_causal_lm(spec) if lm else load_scalar(spec).classifier
    loaded = {name: p.detach() for name, p in model.named_parameters()}
    return loaded.__getitem__


def _files(directory: Path) -> Mapping[str, Path]:
    found: dict[str, Path] = {}
    for file in weight_files(directory):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor.float()
