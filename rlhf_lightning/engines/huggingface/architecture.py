"""Whether a checkpoint is of a model, adapters fit one, or ranks can share one, without loading any."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from rlhf_lightning.engines.checkpoint import check_files, read_state
from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.headers import read_header
from rlhf_lightning.engines.huggingface.adapters import HEAD, adapt, check_lora
from rlhf_lightning.engines.huggingface.source import described, resolve, weight_files
from rlhf_lightning.engines.huggingface.tensor_plan import check_tensor
from rlhf_lightning.engines.packed.attention import ADVICE, why_not_packed
from rlhf_lightning.extras import import_extra
from rlhf_lightning.spec import EMBEDDED, ModelSpec


def check_checkpoint(spec: ModelSpec, head: Head, directory: Path) -> None:
    """Compare the names and shapes of a checkpoint's tensors with those of the model's architecture.

    Raises:
        ValueError: the checkpoint is damaged or incomplete, or of another model.
    """
    check_lora(directory, spec.lora)
    check_files(directory)
    trained = {n: weight for n, weight in _blank(spec, head).named_parameters() if weight.requires_grad}
    read_state(directory, {f"model.{name}": weight for name, weight in trained.items()})


def check_adapters(spec: ModelSpec, head: Head) -> None:
    """Refuse adapters that the model cannot have, without loading it; a hub name is not looked up.

    Raises:
        ValueError: peft is not installed, the directory has no weights, or the model no such layers.
    """
    directory = Path(spec.path).expanduser()
    if spec.path != EMBEDDED and not directory.is_dir():
        import_extra("peft", extra="lora", purpose="lora")
        return
    if not weight_files(resolve(spec)):
        raise ValueError(
            f"{directory}: holds a config.json without weights, and adapters add to weights that are there. "
            "Type a directory with weights, or leave lora out."
        )
    _blank(spec, head)


def check_head(spec: ModelSpec, *, needed: bool) -> None:
    """Refuse weights whose head makes other than one number, or that have none; a hub name is not looked up.

    A directory with a config.json alone is that of a fresh model, and has a fresh head.

    Args:
        spec: of a model with a number for a token.
        needed: whether weights without a head are refused: nothing would train a fresh one.

    Raises:
        ValueError: as said.
    """
    shapes = _headers(spec)
    head = next((names[HEAD] for names in shapes if HEAD in names), None)
    if shapes and head is None and needed:
        raise ValueError(
            f"path={spec.path}: its weights have no {HEAD}, the head of a reward or cost model, and a fresh "
            "one would make its scores up. Type the directory of a sequence-classification model with one "
            "output, such as `rlhf export` writes after --algo rewardmodel."
        )
    if head is not None and head[0] != 1:
        raise ValueError(
            f"path={spec.path}: is a classifier of {head[0]} classes ({HEAD} is {list(head)}). Type the "
            "directory of one with a single output."
        )


def check_language(spec: ModelSpec) -> None:
    """Refuse weights that score answers instead of speaking; a hub name is not looked up.

    Raises:
        ValueError: as said.
    """
    if any(HEAD in names for names in _headers(spec)):
        raise ValueError(
            f"path={spec.path}: its weights have {HEAD}, the head of a reward, cost or value model. Type the "
            "directory of a language model."
        )


def check_packed(spec: ModelSpec) -> None:
    """Refuse a model whose config.json says that its attention cannot be packed; no weights are looked at.

    Raises:
        ValueError: as said.
    """
    if (directory := described(spec)) is None:
        return
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    if reason := why_not_packed(config):
        raise ValueError(f"path={spec.path}: a model of type {config.model_type}, which {reason}. {ADVICE}")


def check_shared(spec: ModelSpec, head: Head, t: int) -> None:
    """Refuse a model whose layers t tensor ranks of the FSDP engine cannot share, without loading it.

    Raises:
        ValueError: as said.
    """
    if t > 1:
        check_tensor(_blank(spec, head), t)


def _headers(spec: ModelSpec) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of each weight file's tensors; none of a hub name, which is not looked up."""
    directory = Path(spec.path).expanduser() if spec.path != EMBEDDED else resolve(spec)
    return [read_header(file) for file in weight_files(directory)] if directory.is_dir() else []


def _blank(spec: ModelSpec, head: Head) -> PreTrainedModel:
    """The model without memory, with adapters where it has them."""
    config = AutoConfig.from_pretrained(resolve(spec), local_files_only=True)
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    if head != "lm":
        config.num_labels = 1
    with torch.device("meta"):
        module = cast(PreTrainedModel, kind.from_config(config))  # type: ignore[no-untyped-call]
        if spec.lora is not None:
            adapt(module, spec.lora, seed=0)
    return module
