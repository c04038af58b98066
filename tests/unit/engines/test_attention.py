from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf_lightning.engines import check_packed
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.engines.native.kv import Decode
from rlhf_lightning.engines.packed import attention, flash
from rlhf_lightning.engines.packed.attention import IMPLEMENTATION, Packed, use_interface, why_not_packed
from rlhf_lightning.engines.packed.layer import Layer
from rlhf_lightning.spec import ModelSpec
from tests.unit.engines.decoders import KINDS, VOCAB, WINDOW, WINDOWED, decoder, other, reference, token_lists
from tests.unit.engines.varlen import plain

# Float32, other orders of addition: 1e-5 is about 80 units in the last place of a logit of size 1.
CLOSE = 1e-5
LENGTHS = {"one": [7], "equal": [6, 6, 6], "runs": [3, 3, 9, 1, 1, 4], "uneven": [20, 1, 2, 19, 3, 1]}


def packed_logits(module: PreTrainedModel, sequences: Sequence[Tensor], packed: Packed) -> Tensor:
    logits: Tensor = module(
        input_ids=torch.cat(list(sequences))[None],
        position_ids=packed.position_ids,
        use_cache=False,
        sequences=packed,
    ).logits[0]
    return logits


def gradients(module: PreTrainedModel, logits: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    weights = torch.linspace(-1, 1, logits.shape[1])
    (logits.log_softmax(-1) * weights).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("waste", [0.0, 0.3, 100.0])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_compute_as_each_alone(kind: str, lengths: list[int], waste: float) -> None:
    sequences = token_lists(lengths)
    module = decoder(kind)
    alone = torch.cat([reference(module, sequence) for sequence in sequences])
    expected = gradients(module, alone)
    use_interface(module)
    together = packed_logits(module, sequences, Packed(lengths, waste=waste))
    torch.testing.assert_close(together, alone, atol=CLOSE, rtol=CLOSE)
    found = gradients(module, together)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # Sums over tokens: the tolerance follows the size of the largest element.
        tolerance = 1e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[name], gradient, atol=tolerance, rtol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_flash_attention_is_each_sequence_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = LENGTHS["uneven"]
    sequences, module = token_lists(lengths), decoder(kind)
    use_interface(module)
    apart = packed_logits(module, sequences, Packed(lengths))
    expected = gradients(module, apart)
    monkeypatch.setattr(flash, "varlen_attn", plain)
    monkeypatch.setattr(attention, "has_flash_attention", lambda *_: True)
    together = packed_logits(module, sequences, Packed(lengths))
    torch.testing.assert_close(together, apart, atol=CLOSE, rtol=CLOSE)
    found = gradients(module, together)
    for name, gradient in expected.items():
        tolerance = 1e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[name], gradient, atol=tolerance, rtol=1e-5, msg=name)


def test_gradient_checkpointing_keeps_the_sequences() -> None:
    sequences = token_lists([5, 3])
    module = decoder("llama")
    use_interface(module)
    expected = gradients(module, packed_logits(module, sequences, Packed([5, 3])))
    module.train()
    module.gradient_checkpointing_enable()
    found = gradients(module, packed_logits(module, sequences, Packed([5, 3])))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=CLOSE, rtol=CLOSE)


def test_a_window_hides_what_is_further_away() -> None:
    module = decoder("mistral")
    (sequence,) = token_lists([3 * WINDOW])
    use_interface(module)
    narrow = packed_logits(module, [sequence], Packed([len(sequence)]))
    module.config.sliding_window = None
    wide = packed_logits(module, [sequence], Packed([len(sequence)]))
    assert torch.allclose(narrow[:WINDOW], wide[:WINDOW], atol=1e-6)
    assert not torch.allclose(narrow[WINDOW:], wide[WINDOW:], atol=1e-2)


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_are_those_of_transformers(kind: str) -> None:
    lengths = [3 * WINDOW, 2, 2 * WINDOW]
    sequences, module = token_lists(lengths), decoder(kind)
    alone = torch.cat([reference(module, sequence) for sequence in sequences])
    use_interface(module)
    torch.testing.assert_close(
        packed_logits(module, sequences, Packed(lengths)), alone, atol=CLOSE, rtol=CLOSE
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("waste", [0.0, 0.5])
def test_a_cpu_rounds_what_it_attends_to_once(dtype: torch.dtype, waste: float) -> None:
    query, key, value = (torch.randn(1, heads, 9, 8).to(dtype) for heads in (4, 2, 2))
    layer, packed = Layer(0, 0.5, 0), Packed([3, 5, 1], waste=waste)
    exact = packed.attend(query.float(), key.float(), value.float(), layer)
    assert torch.equal(packed.attend(query, key, value, layer), exact.to(dtype))
    cache = Cache(9, 4)
    found = Decode(cache, torch.zeros(9, dtype=torch.long), shortest=0, longest=0).attend(
        query, key, value, layer
    )
    assert found.dtype == cache.layers[0][0].dtype == dtype
    ends = torch.tensor([1, 2, 3, 1, 2, 3, 1, 2, 3])
    exact = Decode(cache, ends, shortest=1, longest=3).attend(
        query.float(), key.float(), value.float(), layer
    )
    found = Decode(cache, ends, shortest=1, longest=3).attend(query, key, value, layer)
    assert torch.equal(found, exact.to(dtype))


def test_positions_begin_at_0_in_each_sequence() -> None:
    assert Packed([3, 2]).position_ids.tolist() == [[0, 1, 2, 0, 1]]


@pytest.mark.parametrize("waste", [0.1, 0.5])
def test_groups_hold_no_more_padding_than_allowed(waste: float) -> None:
    lengths = [1, 100, 3, 50, 97, 51, 2, 1, 96, 4]
    groups, _ = Packed(lengths, waste=waste)._grouped
    assert sum(count for count, _ in groups) == len(lengths)
    assert sum(count * length for count, length in groups) <= (1 + waste) * sum(lengths)
    assert len(groups) < len(lengths)


def test_call_without_sequences_is_refused() -> None:
    module = decoder("llama")
    use_interface(module)
    assert module.config._attn_implementation == IMPLEMENTATION
    with pytest.raises(ValueError, match=r"was not given them \(sequences=Packed"):
        module(input_ids=torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "a mask of its own"),
        ({"is_causal": False}, "attention to later tokens"),
    ],
)
def test_what_a_call_asks_for_is_refused(own: dict[str, Tensor | bool], told: str) -> None:
    module = decoder("llama")
    use_interface(module)
    with pytest.raises(ValueError, match=f"LlamaAttention asks for {told}, which packed attention lacks"):
        module(input_ids=torch.zeros(1, 3, dtype=torch.int64), sequences=Packed([3]), **own)


def test_an_encoder_whose_layers_alone_say_so_is_refused() -> None:
    options = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = AutoConfig.for_model("bert", vocab_size=VOCAB, **options)
    module = AutoModelForCausalLM.from_config(config)
    use_interface(module)
    with pytest.raises(ValueError, match="BertSelfAttention asks for attention to later tokens"):
        packed_logits(module, token_lists([3, 2]), Packed([3, 2]))


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("llama", "is_causal", False),
        ("gemma", "use_bidirectional_attention", True),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma4_text", "use_bidirectional_attention", "all"),
    ],
)
def test_a_configuration_that_is_not_causal_is_refused(kind: str, option: str, value: bool | str) -> None:
    assert not why_not_packed(AutoConfig.for_model(kind))
    assert why_not_packed(AutoConfig.for_model(kind, **{option: value})) == "is not causal"


def test_attention_in_both_directions_to_images_is_none_to_texts() -> None:
    config = AutoConfig.for_model("gemma4_text", use_bidirectional_attention="vision")
    assert not why_not_packed(config)


SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 8}
REFUSED: dict[str, tuple[dict[str, int], str]] = {
    "gemma2": (GROUPED, "caps its attention logits at 50"),
    "gpt_oss": ({**GROUPED, "num_local_experts": 2}, "attention sinks"),
    "bloom": ({"hidden_size": 16, "n_head": 2, "n_layer": 1}, "not through transformers' AttentionInterface"),
    "mamba": ({"hidden_size": 16, "num_hidden_layers": 1}, "has layers of type linear_attention"),
    "xlstm": ({"hidden_size": 16, "num_blocks": 1, "num_heads": 2}, "keeps a state beside keys and values"),
    "t5": ({"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}, "is an encoder-decoder"),
    "llama4_text": (
        {**GROUPED, "num_local_experts": 1, "intermediate_size_mlp": 16},
        "has layers of type chunked_attention",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_models_are_refused(kind: str) -> None:
    options, reason = REFUSED[kind]
    module = other(kind, **options)
    name = type(module).__name__
    with pytest.raises(ValueError, match=rf"{name} \(model_type={kind}\) .*{reason}.*Take a decoder"):
        use_interface(module)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("nemotron", {**SIZES, "num_key_value_heads": 1, "head_dim": 8}, "Attention was called without"),
        ("bert", SIZES, "asks for attention to later tokens"),
        (
            "gptj",
            {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4},
            "computes its attention by itself",
        ),
    ],
)
def test_what_only_its_layers_tell_is_told_before_the_weights_are_read(
    kind: str, options: dict[str, int], reason: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(kind, **options).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"path={tmp_path}: a model of type {kind}: .*{reason}.*Take a dec"):
        check_packed(ModelSpec(path=str(tmp_path)), "lm")


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_can_take_packed_sequences_are_let_through(kind: str, tmp_path: Path) -> None:
    decoder(kind).config.save_pretrained(tmp_path)
    check_packed(ModelSpec(path=str(tmp_path)), "lm")


def test_what_the_meta_device_cannot_compute_refuses_no_model(tmp_path: Path) -> None:
    """GPT-2 looks for its pad token among the tokens."""
    config = decoder("gpt2").config
    config.pad_token_id = 0
    config.save_pretrained(tmp_path)
    check_packed(ModelSpec(path=str(tmp_path)), "lm")


def test_another_model_in_the_same_directory_is_tried_anew(tmp_path: Path) -> None:
    decoder("llama").config.save_pretrained(tmp_path)
    check_packed(ModelSpec(path=str(tmp_path)), "lm")
    AutoConfig.for_model("bert", **SIZES).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"a model of type bert: .*later tokens"):
        check_packed(ModelSpec(path=str(tmp_path)), "lm")
