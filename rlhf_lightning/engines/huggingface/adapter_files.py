"""Files of low-rank adapters, as peft writes them: read into a model that has such adapters, and written.

in a file    base_model.model.<layer>.lora_A.weight     base_model.model.score.weight of a scalar model
in a model   <layer>.lora_A.default.weight              score.weight
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_lightning.engines.huggingface.source import ADAPTER_CONFIG, copy_tokenizer, read_json, resolve
from rlhf_lightning.engines.tensor_files import read_header, save_file
from rlhf_lightning.spec import EMBEDDED, LoRA, ModelSpec

HEAD = "score.weight"
"""The head of a scalar model: it has no adapter but is trained itself, since it may be fresh."""
ADAPTER = "default"
"""What peft calls the adapters of a model within the names of its parameters."""
FACTOR = ".lora_"

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MERGE = "Merge them into their base model with peft's merge_and_unload, and type that model as the path."
_FRESH = "They cannot be merged either: type plain ones, or leave lora.path out to begin with fresh ones."
_OTHER_KINDS = (
    "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "lora_bias", "kasa_config", "use_bdlora",
    "trainable_token_indices", "target_parameters", "layer_replication", "arrow_config", "monteclora_config",
)  # fmt: skip
"""Options with which adapters are not W + alpha / rank B A of linear layers, with one rank and one alpha."""
_UNMERGED = ("alora_invocation_tokens", "use_qalora")
"""Those with which none can be merged: they act on some tokens only, or on inputs that are averaged."""
_BESIDE_THE_BASE = ("none", "true", "false", "gaussian", "eva", "orthogonal", "mica")
"""Values of peft's `init_lora_weights` with which W is the weight of the base model; others change it."""


def is_factor(name: str) -> bool:
    """Whether a parameter is a factor of an adapter."""
    return FACTOR in name


def is_trained(name: str) -> bool:
    """Whether a parameter of an adapted model is trained: a factor, or the head of a scalar model."""
    return is_factor(name) or name == HEAD


def load_adapters(model: PreTrainedModel, lora: LoRA) -> None:
    """Copy the adapters of a directory into a model; one on the meta device is only compared with them.

    A scalar model takes the head that is among them; without one it keeps its own.

    Args:
        model: with adapters as `lora` describes them.
        lora: the directory, and what the adapters in it have to be.

    Raises:
        ValueError: there are no such files, or they are of other adapters or of another model.
    """
    mine = {_stored_name(n): p for n, p in model.named_parameters() if is_trained(n)}
    shapes = check_adapter_files(lora, _layers(mine))
    _check_family(lora, model.config.model_type)
    expected = {name: tuple(parameter.shape) for name, parameter in mine.items()}
    if _PREFIX + HEAD not in shapes:
        expected.pop(_PREFIX + HEAD, None)
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise ValueError(
                f"lora.path={lora.path}: {name} is {shapes.get(name, 'missing')} there and "
                f"{expected.get(name, 'missing')} in this model, so they are adapters of another one. Type "
                "the path of the model that they were trained on."
            )
    if any(parameter.is_meta for parameter in mine.values()):
        return
    with torch.no_grad():
        for name, value in load_file(Path(lora.path).expanduser() / _WEIGHTS).items():
            mine[name].copy_(value)


def _check_family(lora: LoRA, family: str) -> None:
    """Refuse adapters of a model of another type, as far as that model is still where they say."""
    base = _read_options(lora.path).get("base_model_name_or_path")
    config = Path(str(base)).expanduser() / "config.json"
    theirs = read_json(config).get("model_type") if config.is_file() else family
    if theirs != family:
        raise ValueError(
            f"lora.path={lora.path}: adapters of {base}, a model of type {theirs}, and this is a {family}. "
            "Type the path of the model that they were trained on."
        )


def check_adapter_files(lora: LoRA, layers: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Refuse a directory of other adapters than `lora` says, reading only options and tensor headers.

    Args:
        lora: the directory, rank and alpha.
        layers: last parts of the names of the layers with adapters, sorted; none if they are not known.

    Returns:
        The shape of each tensor in the file, by its name there.
    """
    options, shapes = _read_options(lora.path), read_header(Path(lora.path).expanduser() / _WEIGHTS)
    rank, alpha, theirs = options.get("r"), options.get("lora_alpha"), _layers(shapes)
    if (rank, alpha) != (lora.rank, lora.alpha) or (layers and list(layers) != theirs):
        named = f" and the layers {', '.join(layers)}" if layers else ""
        raise ValueError(
            f"lora.path={lora.path}: its adapters have rank {rank}, alpha {alpha} and the layers "
            f"{', '.join(theirs)}; lora has rank {lora.rank}, alpha {lora.alpha:g}{named}. Type lora.rank "
            f"{rank}, lora.alpha {alpha} and lora.target_modules [{','.join(theirs)}]."
        )
    return shapes


def export_adapters(
    directory: Path, stored: Mapping[str, Tensor], *, like: PreTrainedModel, spec: ModelSpec
) -> None:
    """Write adapters in peft's format, for `PeftModel.from_pretrained(base model, directory)`.

    Args:
        directory: where to write adapter_config.json, adapter_model.safetensors and the tokenizer.
        stored: the whole parameters by name; the trained ones are float32, and are written as such.
        like: a model with these adapters.
        spec: of the model; the path or hub name of the base model is written too.
    """
    scalar = HEAD in stored
    config = dataclasses.replace(
        cast(Any, like).peft_config[ADAPTER],  # peft keeps the adapters' configuration there
        task_type="SEQ_CLS" if scalar else "CAUSAL_LM",
        modules_to_save=[HEAD.partition(".")[0]] if scalar else None,
        base_model_name_or_path=str(resolve(spec)) if spec.path == EMBEDDED else spec.path,
        inference_mode=True,
    )
    config.save_pretrained(directory)
    trained = {
        _stored_name(name): tensor.detach().cpu().contiguous()
        for name, tensor in stored.items()
        if is_trained(name)
    }
    save_file(trained, directory / _WEIGHTS, {"format": "pt"})
    copy_tokenizer(spec, directory)


def _stored_name(name: str) -> str:
    """The name in a file of a parameter of a model."""
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


def _read_options(path: str) -> dict[str, object]:
    """The options of the adapters of a directory: those of LoRA, and no variant of it."""
    directory = Path(path).expanduser()
    for name in (ADAPTER_CONFIG, _WEIGHTS):
        if not (directory / name).is_file():
            raise ValueError(
                f"lora.path={path}: there is no {name}. Type a directory of adapters, as peft's "
                "save_pretrained and `rlhf export --adapters` write it."
            )
    options = read_json(directory / ADAPTER_CONFIG)
    kind = options.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"lora.path={path}: adapters of the kind {kind}, not LORA. {_MERGE}")
    for name in _OTHER_KINDS + _UNMERGED:
        if options.get(name):
            instead = _FRESH if name in _UNMERGED else _MERGE
            raise ValueError(
                f"lora.path={path}: these adapters have {name}={options[name]}, and here they are W + "
                f"alpha / rank B A of linear layers, with one rank and one alpha, for all tokens. {instead}"
            )
    begun = options.get("init_lora_weights")
    if str(begun).lower() not in _BESIDE_THE_BASE:
        raise ValueError(
            f"lora.path={path}: these adapters have init_lora_weights={begun}, which changed the weights of "
            f"their base model too, and here those stay as they are. {_MERGE}"
        )
    return options


def _layers(names: Iterable[str]) -> list[str]:
    """The last parts of the names of the layers that have adapters."""
    return sorted({name.partition(FACTOR)[0].rpartition(".")[2] for name in names if is_factor(name)})
