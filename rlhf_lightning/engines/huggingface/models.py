"""Loads and exports Hugging Face decoders, with a language-model head or with one number per token.

Weights are memory-mapped in the dtype of their files: the ranks of a node share one copy in the page cache,
and each rank casts only the part that it keeps to float32.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.huggingface.adapter_files import HEAD
from rlhf_lightning.engines.huggingface.adapters import adapt
from rlhf_lightning.engines.huggingface.older_names import add_older_names
from rlhf_lightning.engines.huggingface.padding import pad_apart
from rlhf_lightning.engines.huggingface.source import (
    check_model,
    config_source,
    copy_tokenizer,
    resolve,
    stored_type,
    weight_files,
)
from rlhf_lightning.engines.packed.attention import Sequences, use_interface
from rlhf_lightning.environment import environment, for_deepspeed
from rlhf_lightning.spec import ModelSpec

_Kind = type[AutoModelForCausalLM | AutoModelForSequenceClassification]


class ScalarModel(nn.Module):
    """A decoder with one number per token: AutoModelForSequenceClassification(num_labels=1), unpooled."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(
        self, input_ids: Tensor, *, position_ids: Tensor, sequences: Sequences, keep: Tensor
    ) -> Tensor:
        """Compute the numbers of the kept tokens.

        Args:
            input_ids: [1, T] int64.
            position_ids: [1, T] int64.
            sequences: which tokens form a sequence.
            keep: [K] int64, indices of tokens among the T.

        Returns:
            [K, 1], in the dtype of the computation.
        """
        decoder = self.classifier.base_model
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, sequences=sequences)
        score = cast(nn.Module, self.classifier.score)
        return cast(Tensor, score(output.last_hidden_state[0, keep]))


def load_model(spec: ModelSpec, head: Head) -> tuple[nn.Module, PreTrainedModel]:
    """Load a model in evaluation mode, with gradient checkpointing where the spec asks for it.

    Returns:
        What is called, and the Hugging Face model: the same one, or the classifier in a `ScalarModel`.

    Raises:
        ValueError: as `load_causal_lm`, or as `load_scalar`.
    """
    root = load_causal_lm(spec) if head == "lm" else load_scalar(spec)
    model = root.classifier if isinstance(root, ScalarModel) else root
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return root.eval(), model


def load_causal_lm(spec: ModelSpec) -> PreTrainedModel:
    """Load the causal language model of a directory; a fresh one where the directory has only config.json.

    It gets the adapters of the spec. Weights keep the dtype of the files where that is the same for all.

    Raises:
        ValueError: the directory cannot be loaded.
    """
    directory = _checked(spec)
    model, missing = _load(AutoModelForCausalLM, directory, _config(directory), seed=spec.init_seed or 0)
    _refuse_missing(directory, missing)
    _refuse_untied(directory, model)
    return _prepared(model, spec)


def load_scalar(spec: ModelSpec) -> ScalarModel:
    """Load the same decoder with a `score` head, which is fresh (from `init_seed`) where the files have none.

    Raises:
        ValueError: the directory cannot be loaded, or its weights have no head and nothing would train one.
    """
    directory = _checked(spec)
    config = _config(directory)
    config.num_labels = 1
    model, missing = _load(AutoModelForSequenceClassification, directory, config, seed=spec.init_seed or 0)
    _refuse_missing(directory, missing - {HEAD})
    if HEAD not in dict(model.named_parameters()):
        raise ValueError(f"{directory}: {type(model).__name__} has no {HEAD}. Use a decoder such as llama.")
    if HEAD in missing and not spec.weights_change:
        raise headless(spec)
    if HEAD in missing or not weight_files(directory):
        weight = model.get_parameter(HEAD)
        weight.data = fresh_head(weight.shape[1], seed=spec.init_seed or 0)
    return ScalarModel(_prepared(model, spec))


@contextmanager
def recomputing(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Within this context layers with gradient checkpointing keep their inputs alone, and compute twice.

    transformers asks whether a layer is in training mode. What lies within a layer stays in evaluation mode:
    in the other, routers of experts may draw, and an update would compute another function than rollouts.

    Args:
        model: in evaluation mode; it is again on exit.
        wanted: False changes nothing.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    try:
        for layer in layers:
            layer.training = wanted
        yield
    finally:
        for layer in layers:
            layer.training = False


def empty_model(config: PreTrainedConfig, head: Head) -> PreTrainedModel:
    """A model's module on the meta device, where parameters have shapes and take no memory."""
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    if head != "lm":
        config.num_labels = 1
    with torch.device("meta"):
        return cast(PreTrainedModel, kind.from_config(config))  # type: ignore[no-untyped-call]


def export_model(
    directory: Path, values: Mapping[str, Tensor], *, like: PreTrainedModel, spec: ModelSpec
) -> None:
    """Write a Hugging Face directory.

    Args:
        directory: where to write.
        values: the whole weights on the host, by name; tied ones once.
        like: a model of the same class and configuration; its buffers are used, its weights are not.
        spec: of the model; gives the dtype of the weights, and the tokenizer.
    """
    with quiet(), torch.device("meta"):
        module = type(like)(copy.deepcopy(like.config))  # saving writes into it
    dtype = getattr(torch, spec.computes_in)
    held = {name: buffer.cpu() for name, buffer in like.named_buffers() if not buffer.is_meta}
    buffers = {name: held[name] for name, _ in module.named_buffers() if name in held}
    weights = {name: weight.to(dtype) for name, weight in values.items()}
    module.load_state_dict(buffers | weights, strict=False, assign=True)
    module.tie_weights()
    # transformers writes only on rank 0 of the world, and a role may be on other ranks.
    module.should_save_on_this_rank = lambda is_main_process: is_main_process  # type: ignore[method-assign]
    with environment(for_deepspeed()), quiet():  # saving imports DeepSpeed where it is installed
        module.save_pretrained(directory)
    for file in directory.glob("model*.safetensors"):  # safetensors keeps its files private
        shutil.copymode(directory / "config.json", file)
    add_older_names(directory / "config.json")
    # What transformers has made of config.json, whose end tokens end nothing here.
    (directory / "generation_config.json").unlink(missing_ok=True)
    copy_tokenizer(spec, directory)
    if HEAD in weights:
        pad_apart(directory, spec)


def export_gathered(
    directory: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    like: PreTrainedModel,
    spec: ModelSpec,
    group: dist.ProcessGroup | None,
) -> None:
    """`export_model` from the first rank of a group; all ranks call it, and return together.

    To iterate over the weights is collective, and gathers one after the other.
    """
    first = group is None or dist.get_rank(group) == 0
    whole = {name: weight.cpu() for name, weight in weights if first}
    if first:
        export_model(directory, whole, like=like, spec=spec)
    if group is not None:
        dist.barrier(group)


def read_config(spec: ModelSpec) -> PreTrainedConfig:
    """The configuration of a model, with dropout set to 0, as all models compute here.

    Raises:
        ValueError: the directory cannot be loaded.
    """
    check_model(spec)
    return _config(config_source(spec))


def _load(
    kind: _Kind, directory: Path, config: PreTrainedConfig, *, seed: int
) -> tuple[PreTrainedModel, set[str]]:
    """The model and the names of parameters that the weight files lack."""
    files = weight_files(directory)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not files:
            fresh = kind.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
            return cast(PreTrainedModel, fresh), set()
        dtype = stored_type(files)
        model, missing = _mapped(kind, directory, config, dtype=dtype)
        if dtype != torch.float32 and any(buffer.dtype == dtype for buffer in model.buffers()):
            # Buffers that are in no file, such as rotary frequencies, would be rounded: load in float32.
            model, missing = _mapped(kind, directory, config, dtype=torch.float32)
    return model, missing


def _mapped(
    kind: _Kind, directory: Path, config: PreTrainedConfig, *, dtype: torch.dtype
) -> tuple[PreTrainedModel, set[str]]:
    try:
        loaded = kind.from_pretrained(
            directory, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except RuntimeError as err:
        raise ValueError(f"{directory}: the weight files do not fit config.json ({err}).") from err
    model, info = cast(tuple[PreTrainedModel, dict[str, set[str]]], loaded)
    return model, set(info["missing_keys"])


def _prepared(model: PreTrainedModel, spec: ModelSpec) -> PreTrainedModel:
    use_interface(model)
    if spec.lora is not None:
        adapt(model, spec.lora, seed=spec.init_seed or 0)
    return model


def headless(spec: ModelSpec) -> ValueError:
    """The error for weights without a head where nothing would train a fresh one."""
    return ValueError(
        f"path={spec.path}: its weights have no {HEAD}, the head of a reward, cost or value model, and a "
        "fresh one would make its numbers up. Type the directory of a sequence-classification model with one "
        "output, such as `rlhf export` writes after --algo rewardmodel."
    )


def fresh_head(hidden: int, *, seed: int) -> Tensor:
    """Weights [1, hidden] float32, drawn so that normalised hidden states give values of variance 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(1, hidden).normal_(std=(hidden + 1) ** -0.5, generator=generator)


def _checked(spec: ModelSpec) -> Path:
    directory = resolve(spec)
    check_model(spec)
    return directory


def _config(directory: Path) -> PreTrainedConfig:
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    # A policy ratio compares two passes over the same tokens: dropout would count as a change of policy.
    for name, value in config.to_dict().items():
        if ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return cast(PreTrainedConfig, config)


def _refuse_missing(directory: Path, names: set[str]) -> None:
    if names:
        raise ValueError(
            f"{directory}: the weight files lack {len(names)} tensors, among them {min(names)}. "
            "Copy the complete directory."
        )


def _refuse_untied(directory: Path, model: PreTrainedModel) -> None:
    """Refuse weights that transformers has left untied: an export would tie them, and lose one of the two."""
    expected = model.get_expanded_tied_weights_keys(all_submodels=True)
    if untied := expected.keys() - model.all_tied_weights_keys.keys():
        name = min(untied)
        raise ValueError(
            f"{directory}: config.json says tie_word_embeddings=true, and {name} in the weight files differs "
            f"from {expected[name]}. Type a copy of the directory whose config.json says false."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from warning of fresh heads, which are intended, and from showing progress bars."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
