"""Shapes: parameters counted as the real models have them."""

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_lightning.mapping import shapes

pytestmark = pytest.mark.unit

SMOLLM2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 101, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 101}


@pytest.mark.parametrize("config", [SMOLLM2, QWEN2])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_parameters_are_those_of_the_model(
    tmp_path: Path, config: dict[str, object], head: shapes.Head
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = AutoConfig.from_pretrained(tmp_path)
    settings.num_labels, settings.pad_token_id = 1, 0
    make = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = make.from_config(settings)  # type: ignore[no-untyped-call]
    assert shapes.load(str(tmp_path), head=head).num_parameters == sum(p.numel() for p in model.parameters())


def test_the_known_models_have_the_sizes_of_their_names() -> None:
    billions = [shape.num_parameters / 1e9 for shape in shapes.KNOWN.values()]
    assert billions == pytest.approx([6.738, 13.016, 33.744, 68.977], abs=0.001)


def test_a_gpt_has_two_matrices_in_its_feed_forward(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    shape = shapes.load(str(tmp_path / "config.json"))
    assert (shape.gated, shape.tied, shape.intermediate) == (False, True, 256)
    assert shape.layer_matrix_parameters == 12 * 64**2


def test_keys_of_few_heads_are_on_several_devices() -> None:
    shape = shapes.load("llama-70b")
    assert shape.kv_bytes() == 2 * 2 * 80 * 1024
    assert shape.kv_bytes(tensor=16) == shape.kv_bytes(tensor=8) == shape.kv_bytes() / 8


def test_what_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'llama-8b'.*llama-7b, llama-13b, llama-34b, llama-70b, embedded"):
        shapes.load("llama-8b")
    for key in ("num_experts", "moe_num_experts"):
        (tmp_path / "config.json").write_text(json.dumps({**QWEN2, key: 8}))
        with pytest.raises(ValueError, match=f"{key} says a mixture of experts"):
            shapes.load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**QWEN2, "num_local_experts": 0}))
    assert shapes.load(str(tmp_path)).layers == QWEN2["num_hidden_layers"], "as dense Granite models say"


def small(model_type: str, **more: object) -> dict[str, object]:
    return {
        "model_type": model_type, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": 1001, "head_dim": 16, **more,
    }  # fmt: skip


FAMILIES = ("gemma", "gemma2", "phi", "starcoder2", "qwen3", "gpt_neox", "opt", "granite")


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_differ_in_what_their_files_leave_out(kind: str, tmp_path: Path) -> None:
    """Ties and matrices are those of the model; norms and biases, up to 1.5% here, are not all counted."""
    more: dict[str, object] = {"word_embed_proj_dim": 64, "ffn_dim": 256} if kind == "opt" else {}
    (tmp_path / "config.json").write_text(json.dumps(small(kind, **more)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    count = sum(p.numel() for n, p in model.named_parameters() if "embed_positions" not in n)
    assert shapes.load(str(tmp_path)).num_parameters == pytest.approx(count, rel=0.015)


def test_an_unknown_family_is_taken_for_a_llama(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = {"text_config": small("novel"), "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with caplog.at_level(logging.WARNING):
        shape = shapes.load(str(tmp_path))
    assert (shape.gated, shape.tied) == (True, True)
    assert "model_type novel is not known, and taken for one like llama" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json: is not JSON \("),
        ("[1]", r"config\.json: is not the config\.json of a model"),
        (json.dumps(small("llama") | {"hidden_size": "x"}), "hidden_size is 'x', and has to be a whole"),
        (json.dumps(small("llama") | {"num_attention_heads": 0}), "num_attention_heads is 0, and has to"),
        (json.dumps(small("llama") | {"intermediate_size": [9]}), r"intermediate_size is \[9\], and has"),
        (json.dumps(small("llama") | {"num_key_value_heads": -2}), "num_key_value_heads is -2, and has to"),
        (json.dumps(small("llama") | {"head_dim": "16"}), "head_dim is '16', and has to"),
    ],
)
def test_a_wrong_config_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        shapes.load(str(tmp_path))
