"""Weights that vLLM is given are those of its model, each by name and shape; without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from rlhf_lightning.engines.exchange import fitting
from rlhf_lightning.engines.vllm.weights import as_trained, needed, weight_shapes
from tests.unit.engines import tiny


def test_what_would_be_in_files_is_needed() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scalar", torch.ones(1))
    model.register_buffer("angles", torch.ones(1), persistent=False)
    model.register_buffer("_k_scale", torch.ones(1))
    assert needed(torch.nn.Sequential(model)) == {"0.weight", "0.bias", "0.scalar"}


def test_a_tied_output_layer_may_be_given_too(tmp_path: Path) -> None:
    shapes = weight_shapes(tiny.spec(tiny.write_causal(tmp_path, tie=True)))
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == (tiny.VOCABULARY, 64)


@pytest.mark.parametrize(
    ("name", "shape", "has"),
    [("b", (2, 3), "no such parameter"), ("a", (3, 2), r"\(2, 3\)"), ("a", (1, 3), r"\(2, 3\)")],
)
def test_weights_of_another_architecture_are_refused(name: str, shape: tuple[int, ...], has: str) -> None:
    given = [("a", torch.zeros(2, 3)), (name, torch.zeros(shape))]
    taken = fitting(given, {"a": torch.Size([2, 3])}, owner="vLLM of m")
    assert next(taken)[1] is given[0][1]
    with pytest.raises(ValueError, match=rf"^vLLM of m: was given {name} .* and has {has}\. Giver"):
        next(taken)


def test_vllm_reads_the_class_and_the_length_that_the_model_is_trained_with(tmp_path: Path) -> None:
    """Its files may name another class, and have the original length of LongRoPE where vLLM does not look."""
    long: dict[str, object] = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    known: dict[str, object] = {"architectures": ["Qwen2ForCausalLM"]}
    for rope, more in (
        ({"rope_type": "default"}, {}),
        (long | {"original_max_position_embeddings": 32}, {"original_max_position_embeddings": 32}),
    ):
        sizes: Any = {**tiny.SIZES, "rope_parameters": {"rope_theta": 1e4, **rope}}
        Qwen2Config(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
        assert as_trained(tiny.spec(tmp_path)) == known | more
