"""Steps of few tokens through fused weights say what the model's own layers say."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf_lightning.engines import NativeGenerator
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.head import Asked
from rlhf_lightning.engines.native.decoder import WholeDecoder
from rlhf_lightning.engines.native.fused import FusedDecoder, can_fuse, decoder_of
from rlhf_lightning.engines.packed.attention import use_interface
from rlhf_lightning.engines.packed.forward import forward
from rlhf_lightning.spec import Sampling
from tests.unit.engines.decoders import agree, asked, decoder

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without it")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
BENT = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama with other angles": ("llama", {"rope_parameters": BENT}),
    "llama with a head size of its own": ("llama", {"head_dim": 16}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "tied qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
}


def made(kind: str, options: dict[str, object]) -> PreTrainedModel:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | options))
    for parameter in module.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    use_interface(module)
    return cast(PreTrainedModel, module.eval())


def answers(decoding: WholeDecoder, rows: TensorDict) -> TensorDict:
    generator = NativeGenerator(
        decoding, device="cpu", ends=Ends(pad_token_id=0, eos_token_ids=(1, 2, 3, 4, 5, 6))
    )
    return generator.generate(rows, sampling=Sampling(max_new_tokens=12), seed=3)


def distance(module: PreTrainedModel, rows: TensorDict, found: TensorDict) -> float:
    """Mean difference of what was drawn from what the model says of it in float32."""
    exact = copy.deepcopy(module).float()
    with torch.no_grad():
        known = forward(exact, rows.update(found), head="lm", temperature=1.0, asked=Asked())["log_probs"]
    mask = found["response_mask"]
    return float((found["log_probs"] - known)[mask].abs().mean())


@pytest.mark.parametrize("name", MODELS)
def test_fused_weights_draw_the_same(name: str) -> None:
    module, rows = made(*MODELS[name]), asked(9, 3, 17, 9, 1)
    assert isinstance(decoder_of(module), FusedDecoder)
    expected = answers(WholeDecoder(module), rows)
    assert len(set(expected["response_mask"].sum(1).tolist())) > 1
    agree(answers(FusedDecoder(module), rows), expected)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="these cores lack AVX-512")
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_near_the_truth_as_the_model_itself(name: str) -> None:
    module, rows = made(*MODELS[name]).bfloat16(), asked(9, 3, 17, 9, 1)
    assert isinstance(decoder_of(module), FusedDecoder)
    far = {}
    for kind in (FusedDecoder, WholeDecoder):
        found = answers(kind(module), rows)
        far[kind] = distance(module, rows, found)
    assert 0 < far[FusedDecoder] < 4 * far[WholeDecoder]  # other drawings, too


def test_many_tokens_go_through_the_model_and_few_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_lightning.engines.native.fused.MANY_TOKENS", 256)
    module = made("llama", {})
    passes: list[int] = []
    module.get_input_embeddings().register_forward_pre_hook(lambda _, ids: passes.append(ids[0].shape[1]))
    short, long = asked(200, 55), asked(200, 56)
    found = [answers(FusedDecoder(module), rows) for rows in (short, long)]
    assert passes == [256]
    for rows, each in zip((short, long), found, strict=True):
        agree(each, answers(WholeDecoder(module), rows))


def test_the_weights_are_those_of_the_moment_and_are_let_go() -> None:
    module, rows = made("llama", {}), asked(5, 5)
    fused = FusedDecoder(module)
    before = answers(fused, rows)
    assert fused._steps is None
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    after = answers(fused, rows)
    assert not torch.equal(before["log_probs"], after["log_probs"])
    agree(after, answers(WholeDecoder(module), rows))


def test_a_failure_leaves_no_second_copy() -> None:
    fused = FusedDecoder(made("llama", {}))
    with pytest.raises(KeyError), fused.prepared():
        raise KeyError
    assert fused._steps is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {"mlp_bias": True}), ("llama", {"hidden_act": "gelu"}), ("qwen2", {"hidden_act": "relu"})],
)
def test_layers_of_another_kind_are_not_fused(kind: str, options: dict[str, object]) -> None:
    assert type(decoder_of(made(kind, options))) is WholeDecoder


def test_other_families_types_and_adapted_models_are_not_fused() -> None:
    for kind in ("mistral", "gpt2"):
        module = decoder(kind)
        use_interface(module)
        assert type(decoder_of(module)) is WholeDecoder
    assert not can_fuse(made("llama", {}).half())
    mixed = made("llama", {}).bfloat16()
    mixed.model.norm.float()
    assert not can_fuse(mixed)
    assert not can_fuse(nn.Module.to(made("llama", {}), "meta"))
    peft = pytest.importorskip("peft")
    adapted = made("llama", {})
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), adapted)
    assert not can_fuse(adapted)
