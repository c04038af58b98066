"""Finds the files of a model, in a directory or on the hub, and checks them without reading a tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf_lightning.engines.tensor_files import read_header
from rlhf_lightning.spec import EMBEDDED, EMBEDDED_DIRECTORY, ModelSpec, export_first

ADAPTER_CONFIG = "adapter_config.json"
"""The file by which a directory of adapters, as peft writes it, is recognised."""
_INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.distcp",
)  # fmt: skip
"""Files that may hold a model in another form than those which are read."""
_VERL = ("model_world_size_*.pt", "dist_ckpt")
"""What a checkpoint of verl has beside the directory `huggingface`, in which config and tokenizer are."""
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model",
    "chat_template*", "additional_chat_templates/*.jinja", "generation_config.json",
)  # fmt: skip
"""Patterns of the files that belong to the tokenizer or configure generation."""


def resolve(spec: ModelSpec) -> Path:
    """The directory of the model's files; a hub name is taken from the cache, or else downloaded.

    Raises:
        ValueError: there is no such directory, and no such name on the hub, or no safetensors under it.
    """
    if spec.path == EMBEDDED:
        return EMBEDDED_DIRECTORY
    if on_hub(spec):
        found = _from_hub(spec, "*.json", "*.safetensors", "*.model", "merges.txt", "*.jinja")
        if not weight_files(found):
            raise ValueError(
                f"path={spec.path}: the hub, or its cache here, has no safetensors of it. Save it with "
                "save_pretrained, and type the directory."
            )
        return found
    directory = Path(spec.path).expanduser()
    if not directory.is_dir():
        raise ValueError(f"path={spec.path}: no such directory. Type the path of a Hugging Face directory.")
    return directory


def located(path: str) -> str:
    """Make the path of an existing directory absolute, for devices with another working directory.

    Other names are returned as they are, as text.
    """
    directory = Path(path).expanduser()
    return str(directory.absolute()) if path not in ("", EMBEDDED) and directory.is_dir() else str(path)


def is_fresh(spec: ModelSpec) -> bool:
    """Whether the model has no weights in its directory, and gets those of its seed.

    Raises:
        ValueError: the weights are incomplete, or in another form.
    """
    return not on_hub(spec) and not weight_files(resolve(spec))


def check_model(spec: ModelSpec) -> None:
    """Refuse a model directory that cannot be loaded, reading only its JSON files and tensor headers.

    Of a hub name only the JSON files are looked up.

    Raises:
        ValueError: config.json is missing or names no causal language model, the weights are quantised, a
            weight file is missing, truncated or corrupt, or the hub does not have the name.
    """
    directory = config_source(spec)
    _check_config(directory)
    for file in weight_files(directory) if not on_hub(spec) else ():
        read_header(file)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the model; none where the directory has only a config.json.

    Raises:
        ValueError: a file that the index names is missing, or the weights are in another form.
    """
    index = directory / _INDEX
    if index.exists():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise ValueError(f"{index}: has no weight_map. Export the model again with save_pretrained.")
        files = [directory / str(name) for name in sorted(set(listed.values()))]
    else:
        files = sorted(directory.glob("model*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"{directory}: {index.name} names {missing}, which are not there. Copy them too.")
    pickled = sorted(file.name for file in directory.glob("pytorch_model*.bin"))
    if pickled and not files:
        raise ValueError(
            f"{directory}: the weights are pickled ({pickled[0]}): loading would run what they contain. "
            "Save the model again with save_pretrained, which writes safetensors."
        )
    if not files:
        _refuse_other_weights(directory)
    return files


def _refuse_other_weights(directory: Path) -> None:
    """Refuse a directory whose weights nothing here reads: a fresh model would take their place."""
    others = sorted(file.name for kind in _OTHER_WEIGHTS for file in directory.glob(kind))
    if others:
        raise ValueError(
            f"{directory}: holds {others[0]} and no model*.safetensors, and only these are read. Save the "
            "model with save_pretrained; or, for fresh weights, type a directory that has config.json and "
            "tokenizer alone."
        )
    parent = directory.absolute().parent
    shards = sorted(file.name for kind in _VERL for file in parent.glob(kind))
    if shards and directory.name == "huggingface":
        raise ValueError(
            f"{directory}: has no weights; they are verl's, in {parent / shards[0]}. Merge them with "
            "`python -m verl.model_merger merge`, and type the directory that it writes."
        )


def stored_type(files: Iterable[Path]) -> torch.dtype:
    """The dtype of all tensors in weight files; float32 where they differ, or it is another."""
    found = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            found |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return _TYPES.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32


def tokenizer_files(directory: Path) -> list[Path]:
    """The files of a directory that belong to the tokenizer or configure generation."""
    return sorted(file for pattern in TOKENIZER_FILES for file in directory.glob(pattern) if file.is_file())


def copy_tokenizer(spec: ModelSpec, directory: Path) -> None:
    """Copy the files of a model's tokenizer and generation_config.json to another directory."""
    source = config_source(spec)
    for file in tokenizer_files(source):
        target = directory / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(file, target)


def has_tokenizer(spec: ModelSpec) -> bool:
    """Whether the directory has a tokenizer of its own."""
    directory = config_directory(spec)
    return directory is not None and any(
        file.name.startswith(("tokenizer", "vocab", "spiece")) for file in tokenizer_files(directory)
    )


def config_directory(spec: ModelSpec) -> Path | None:
    """The directory of `config_source`; None: the hub does not give the name."""
    if not on_hub(spec):
        return resolve(spec)
    try:
        return config_source(spec)
    except ValueError:  # `check_model` reports it
        return None


def config_source(spec: ModelSpec) -> Path:
    """The directory with the model's configuration and tokenizer; of a hub name no weights are fetched.

    Raises:
        ValueError: there is no such directory, and no such name on the hub.
    """
    return _from_hub(spec, "config.json", *TOKENIZER_FILES) if on_hub(spec) else resolve(spec)


def _from_hub(spec: ModelSpec, *patterns: str) -> Path:
    try:
        return Path(snapshot_download(spec.path, allow_patterns=list(patterns)))
    except (OSError, HFValidationError) as err:
        reason = str(err).strip().partition("\n")[0]
        raise ValueError(
            f"path={spec.path}: no such directory here, and the hub does not give it ({reason}). Type the "
            "path of a Hugging Face directory."
        ) from err


def on_hub(spec: ModelSpec) -> bool:
    """Whether the path is a name of the hub: two words, and no directory here."""
    path = spec.path
    named = path != EMBEDDED and not path.startswith((".", "/", "~")) and path.count("/") == 1
    return named and not Path(path).is_dir()


def read_json(file: Path) -> dict[str, object]:
    """The object in a JSON file.

    Raises:
        ValueError: the file is not JSON, or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as err:
        raise ValueError(f"{file}: is not JSON ({err}). Copy the file again.") from err
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}, not an object. Copy the file again.")
    return content


def _check_config(directory: Path) -> None:
    file = directory / "config.json"
    adapters = (directory / ADAPTER_CONFIG).exists()
    if adapters and any(directory.glob("model*.safetensors")):
        raise ValueError(
            f"{directory}: holds a model and adapters ({ADAPTER_CONFIG}), which transformers would add to "
            "it. Keep them in two directories: a run goes on with adapters by lora.path."
        )
    if adapters:
        raise ValueError(
            f"{directory}: holds adapters, and no model. Type the directory of their base model as the path, "
            "and this one as lora.path; or merge them, with `rlhf export` without --adapters or with peft's "
            "merge_and_unload."
        )
    if not file.exists():
        instead = export_first(str(directory)) or "Type the path of a Hugging Face model directory."
        raise ValueError(f"{directory}: has no config.json. {instead}")
    config = read_json(file)
    kind = config.get("model_type")
    if kind is None:
        raise ValueError(f'{file}: has no "model_type". Add it, for example "llama".')
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"{file}: model_type={kind!r} is not a causal language model that the installed transformers "
            "knows. Use a decoder such as llama, qwen2, qwen3, mistral or gpt_neox."
        )
    _check_unquantised(file, config)


def _check_unquantised(file: Path, config: Mapping[str, object]) -> None:
    """Refuse weights that mean something only together with scales, which no engine here reads."""
    for part in (config, config.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, Mapping) else None
        if found:
            method = found.get("quant_method", "an unnamed method") if isinstance(found, Mapping) else found
            raise ValueError(
                f"{file}: its quantization_config says {method}: the weights are quantised, and they would "
                "be read here without their scales. Type the directory of the unquantised model."
            )
