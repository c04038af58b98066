"""Loading models, and refusing what cannot be loaded before a tensor is read."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import ApertusConfig, AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig

from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.engines.huggingface.models import load_causal_lm, load_scalar
from rlhf_lightning.engines.huggingface.source import check_model, resolve
from rlhf_lightning.spec import EMBEDDED, Dtype, ModelSpec
from rlhf_lightning.workers import Cost, Critic, Reward, Scorer
from tests.unit.engines import tiny


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    return tiny.write_causal(tmp_path / "model")


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_causal_model_has_the_weights_of_its_directory(causal: Path) -> None:
    model = load_causal_lm(ModelSpec(path=str(causal)))
    assert same(model, AutoModelForCausalLM.from_pretrained(causal))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_one_type_are_mapped_as_they_are(causal: Path, dtype: torch.dtype) -> None:
    AutoModelForCausalLM.from_pretrained(causal, dtype=dtype).save_pretrained(causal)
    weights = list(load_causal_lm(ModelSpec(path=str(causal))).parameters())
    assert {weight.dtype for weight in weights} == {dtype}
    assert not any(weight.untyped_storage().resizable() for weight in weights)
    assert (
        load_scalar(ModelSpec(path=str(causal))).classifier.get_parameter("score.weight").dtype
        == torch.float32
    )


def test_weights_of_two_types_lose_nothing(causal: Path) -> None:
    state = load_file(causal / "model.safetensors")
    state["model.norm.weight"] += 1e-4
    expected = state["model.norm.weight"].clone()
    halved = {name: weight if "norm" in name else weight.bfloat16() for name, weight in state.items()}
    save_file(halved, causal / "model.safetensors", {"format": "pt"})
    model = load_causal_lm(ModelSpec(path=str(causal)))
    assert torch.equal(model.get_parameter("model.norm.weight"), expected)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_constants_of_a_model_are_not_rounded(tmp_path: Path) -> None:
    """Gemma multiplies its embeddings by the root of their size, and has that in no file."""
    config = Gemma3TextConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=40,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = load_causal_lm(ModelSpec(path=str(tmp_path)))
    assert model.get_buffer("model.embed_tokens.embed_scale") == torch.tensor(40**0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_holds_the_buffers_that_files_hold(dtype: Dtype, tmp_path: Path) -> None:
    config = ApertusConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    beta = "model.layers.0.mlp.act_fn.beta"
    model.get_buffer(beta).fill_(0.123456789)
    model.save_pretrained(tmp_path / "model")
    engine = FSDPEngine(ModelSpec(path=str(tmp_path / "model"), dtype=dtype))
    engine.export(tmp_path / "first")
    engine.export(tmp_path / "out")  # the first has left the engine's configuration as it was
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    assert torch.equal(after[beta], before[beta])
    for name, _ in model.named_parameters():
        assert torch.equal(after[name], before[name].to(getattr(torch, dtype))), name


def test_an_export_names_no_more_end_tokens_than_the_model(causal: Path, tmp_path: Path) -> None:
    """Transformers makes a generation_config.json of config.json, whose end tokens are not read here."""
    ends, file = causal / "generation_config.json", tmp_path / "out" / "generation_config.json"
    ends.unlink()
    FSDPEngine(tiny.spec(causal)).export(tmp_path / "out")
    assert not file.exists()
    ends.write_text('{"eos_token_id": 7}')
    FSDPEngine(tiny.spec(causal)).export(tmp_path / "out")
    assert file.read_text() == ends.read_text()


def test_a_config_alone_is_initialised_from_its_seed_and_no_other(tmp_path: Path) -> None:
    tiny.config().save_pretrained(tmp_path)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = load_causal_lm(ModelSpec(path=str(tmp_path), init_seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    assert same(first, load_causal_lm(ModelSpec(path=str(tmp_path), init_seed=1)))
    assert not same(first, load_causal_lm(ModelSpec(path=str(tmp_path), init_seed=2)))


def test_a_scalar_head_is_fresh_on_a_causal_model_and_read_from_a_classifier(
    causal: Path, tmp_path: Path
) -> None:
    first, again, other = (
        load_scalar(ModelSpec(path=str(causal), init_seed=s)).classifier for s in (1, 1, 2)
    )
    assert same(first, again)
    assert not same(first, other)
    backbone = AutoModelForCausalLM.from_pretrained(causal).base_model
    assert same(first.base_model, backbone)
    assert 0.05 < first.get_parameter("score.weight").std() < 0.2
    first.save_pretrained(tmp_path / "classifier")
    assert same(load_scalar(ModelSpec(path=str(tmp_path / "classifier"), init_seed=9)).classifier, first)


@pytest.mark.parametrize("judge", [Reward, Cost])
def test_a_head_that_nothing_trains_is_not_made_up(
    judge: type[Reward | Cost], causal: Path, tmp_path: Path
) -> None:
    told = f"path={causal}: its weights have no score.weight, the head of a reward, cost or value model, and"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        load_scalar(judge(path=str(causal)))
    for trained in (Critic(path=str(causal)), Scorer(path=str(causal))):
        load_scalar(trained)
    load_scalar(judge(path=str(tiny.write_scalar(tmp_path / "scalar"))))


def test_a_scalar_head_on_a_config_alone_comes_from_the_seed(tmp_path: Path) -> None:
    tiny.config().save_pretrained(tmp_path)
    kinds = ModelSpec, ModelSpec, Reward
    first, again, judging = (load_scalar(kind(path=str(tmp_path), init_seed=0)).classifier for kind in kinds)
    assert same(first, again)
    assert same(first, judging)


def test_a_head_that_config_json_says_is_tied_and_is_not(tmp_path: Path) -> None:
    """Transformers would leave it untied, and an export would tie it."""
    path = tiny.write_causal(tmp_path / "model", tie=True)
    state = load_file(path / "model.safetensors")
    embeddings = state["model.embed_tokens.weight"]
    save_file(state | {"lm_head.weight": embeddings.clone()}, path / "model.safetensors", {"format": "pt"})
    model = load_causal_lm(ModelSpec(path=str(path)))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    save_file(state | {"lm_head.weight": embeddings + 1}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model: config.json says tie_word_embeddings=true, and lm_head"):
        load_causal_lm(ModelSpec(path=str(path)))
    config = tiny.config(tie=False)
    config.save_pretrained(path)
    kept = load_causal_lm(ModelSpec(path=str(path))).get_parameter("lm_head.weight")
    assert torch.equal(kept, embeddings + 1)


def test_dropout_is_off(tmp_path: Path) -> None:
    LlamaConfig(**{**tiny.config().to_dict(), "attention_dropout": 0.5}).save_pretrained(tmp_path)
    assert load_causal_lm(ModelSpec(path=str(tmp_path))).config.attention_dropout == 0.0


def test_embedded_is_a_directory_of_the_package() -> None:
    directory = resolve(ModelSpec(path=EMBEDDED))
    assert directory.parts[-2:] == ("rlhf_lightning", "embedded")


def _cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _cut_in_the_header(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def _cut_in_the_length(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x10")


def _garble(directory: Path) -> None:
    header = b"{]" * 40
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def _lengthen(directory: Path) -> None:
    with (directory / "model.safetensors").open("ab") as stream:
        stream.write(b"\0")


def _config(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)


def _quantised(said: dict[str, object]) -> Callable[[Path], None]:
    """Writes this into config.json, where transformers would have it."""

    def spoil(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        _config(directory, json.dumps({**config, **said}))

    return spoil


def _pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _named(name: str) -> Callable[[Path], None]:
    """Gives the file of the weights another name."""

    def spoil(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / name)

    return spoil


def _adapters(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")


def _adapters_alone(directory: Path) -> None:
    """As they are saved by programs that write config.json beside them."""
    _adapters(directory)
    _named("adapter_model.safetensors")(directory)


def _index(directory: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "config.json").unlink(), r"model: has no config.json"),
        (lambda d: _config(d, "{"), r"config.json: is not JSON"),
        (lambda d: _config(d, "[]"), r"config.json: holds a list"),
        (lambda d: _config(d, "{}"), r'config.json: has no "model_type"'),
        (lambda d: _config(d, '{"model_type": "perceptron"}'), r"model_type='perceptron' is not a causal"),
        (lambda d: _config(d, '{"model_type": "vit"}'), r"model_type='vit' is not a causal"),
        (
            _quantised({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
            r"config.json: its quantization_config says fp8: .* Type the directory of the unquantised model",
        ),
        (
            _quantised({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}),
            "quantization_config says mxfp4: the weights are quantised",
        ),
        (_quantised({"quantization_config": {"load_in_4bit": True}}), "says an unnamed method: the weights"),
        (_cut, r"model.safetensors: is truncated or corrupt \(.*file not fully covered"),
        (_lengthen, r"model.safetensors: is truncated or corrupt \(.*file not fully covered"),
        (_cut_in_the_header, r"model.safetensors: is truncated or corrupt \(.*invalid header length"),
        (_cut_in_the_length, r"model.safetensors: is truncated or corrupt \(.*header too small"),
        (_garble, r"model.safetensors: is truncated or corrupt \(.*invalid"),
        (_pickle, r"the weights are pickled \(pytorch_model.bin\)"),
        (_named("consolidated.safetensors"), r"model: holds consolidated.safetensors and no model\*"),
        (_named("model_world_size_1_rank_0.pt"), "holds model_world_size_1_rank_0.pt and no model"),
        (_named("consolidated.00.pth"), "holds consolidated.00.pth and no model"),
        (_named("model-q4.gguf"), "holds model-q4.gguf and no .* Save the model with save_pretrained; or"),
        (_adapters_alone, "model: holds adapters, and no model. Type the directory of their base model"),
        (_adapters, r"model: holds a model and adapters \(adapter_config.json\), which"),
        (_index, r"index.json names \['model-00001-of-00002.safetensors'\], which are not there"),
    ],
)
def test_what_cannot_be_loaded_is_refused(causal: Path, spoil: Callable[[Path], None], message: str) -> None:
    check_model(ModelSpec(path=str(causal)))
    spoil(causal)
    with pytest.raises(ValueError, match=message):
        check_model(ModelSpec(path=str(causal)))
    with pytest.raises(ValueError, match=message):
        load_causal_lm(ModelSpec(path=str(causal)))


@pytest.mark.parametrize("said", [None, {}])
def test_a_config_that_names_no_quantisation_is_taken(causal: Path, said: object) -> None:
    _quantised({"quantization_config": said})(causal)
    check_model(ModelSpec(path=str(causal)))


def test_missing_directories_are_refused(tmp_path: Path) -> None:
    for load in (check_model, load_causal_lm, load_scalar):
        with pytest.raises(ValueError, match=r"nowhere: no such directory. Type the path"):
            load(ModelSpec(path=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match=r"^path=no/such-model: no such directory here, and the hub"):
        load_causal_lm(ModelSpec(path="no/such-model"))


def test_weights_that_lack_a_tensor_are_refused(causal: Path) -> None:
    tiny.config(num_hidden_layers=3).save_pretrained(causal)
    with pytest.raises(ValueError, match=r"lack 9 tensors, among them model.layers.2.input_layernorm.weight"):
        load_causal_lm(ModelSpec(path=str(causal)))
    with pytest.raises(ValueError, match=r"lack 9 tensors, among them model.layers.2.input_layernorm.weight"):
        load_scalar(ModelSpec(path=str(causal)))


def test_weights_of_another_shape_are_refused(causal: Path) -> None:
    tiny.config(intermediate_size=80).save_pretrained(causal)
    with pytest.raises(ValueError, match=r"model: the weight files do not fit config.json"):
        load_causal_lm(ModelSpec(path=str(causal)))


def test_other_architectures_load(tmp_path: Path) -> None:
    GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32).save_pretrained(tmp_path)
    model = load_causal_lm(ModelSpec(path=str(tmp_path)))
    assert model.config.resid_pdrop == 0.0
