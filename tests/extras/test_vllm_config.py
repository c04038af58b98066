"""What is refused before anything is started."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from transformers import AutoConfig, LlamaConfig, Phi3Config, PreTrainedConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from rlhf_lightning import strategy_checks, workers
from rlhf_lightning.algos import GRPO, SFT
from rlhf_lightning.controller import Worker
from rlhf_lightning.data import PromptData, TaskData
from rlhf_lightning.engines import VLLM, check_vllm
from rlhf_lightning.engines.vllm import config
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Colocated, OpenRLHF, Standalone
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Generator, Opponent, Settings
from tests.extras import generating
from tests.unit.algos.short import Started, trainer


def model(head_dim: int = 32) -> PreTrainedConfig:
    return LlamaConfig(hidden_size=128, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu_memory_utilization": 0.0},
            r"^strategy.settings.vllm.gpu_memory_utilization=0.0: is a share in \(0, 1\]",
        ),
        ({"gpu_memory_utilization": 1.5}, r"Try 0.4"),
        ({"max_num_seqs": 0}, "^strategy.settings.vllm.max_num_seqs=0: must be at least 1"),
        ({"kv_cache_gib": -1.0}, "^strategy.settings.vllm.kv_cache_gib=-1.0: is negative"),
        ({"max_num_batched_tokens": -1}, "^strategy.settings.vllm.max_num_batched_tokens=-1: is negative"),
        ({"max_model_len": -1}, "^strategy.settings.vllm.max_model_len=-1: is negative"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLM(**options)  # type: ignore[arg-type]


def test_defaults_suit_the_device() -> None:
    whole = VLLM(gpu_memory_utilization=1.0)
    assert [whole.kv_cache_bytes(on_cpu=on_cpu) for on_cpu in (True, False)] == [2**30, None]
    assert [whole.eager(on_cpu=on_cpu) for on_cpu in (True, False)] == [True, False]
    sized = VLLM(gpu_memory_utilization=0.9, kv_cache_gib=0.5)
    assert sized.kv_cache_bytes(on_cpu=False) == 2**29
    assert sized.share(on_cpu=False) == 0.01, "vLLM would start only where 0.9 of the GPU is free"
    assert [whole.share(on_cpu=on_cpu) for on_cpu in (True, False)] == [0.01, 1.0]
    assert VLLM(enforce_eager=True).eager(on_cpu=False)
    assert [VLLM(max_num_batched_tokens=at_once).rows_at_once for at_once in (0, 8, 900)] == [256, 8, 256]


def test_a_length_at_which_other_factors_hold_is_refused() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64}
    long = Phi3Config(**sizes, original_max_position_embeddings=16, rope_parameters=rope)  # type: ignore[arg-type]
    check_vllm(long, ParallelLayout(), settings=VLLM(max_model_len=16), on_cpu=True)
    with pytest.raises(ValueError, match=r"max_model_len=17: the model has 16 positions.*with LongRoPE, of"):
        check_vllm(long, ParallelLayout(), settings=VLLM(max_model_len=17), on_cpu=True)


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Settings(generator="vllm")
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vLLM is not installed. Try: pip install 'rlhf-lightning\[vllm\]'"):
        Settings(generator="vllm")
    Settings()
    assert importlib.util.find_spec("vllm")


def test_generation_wants_the_device_for_itself() -> None:
    actor, native = Actor(), Actor()
    for role, settings in ((actor, Settings(generator="vllm")), (native, Settings())):
        seat = (0, ParallelLayout(), torch.device("cpu"), None, None)
        role.binding.worker = Worker(*seat, settings=settings)
    assert actor.takes_all("generate_sequences")
    assert not actor.takes_all("update_actor")
    assert not native.takes_all("generate_sequences")


@pytest.mark.parametrize(
    ("head_dim", "layout", "on_cpu", "message"),
    [
        (16, ParallelLayout(), True, r"heads are 16 wide, and on a CPU vLLM takes 32, 64, 80"),
        (20, ParallelLayout(), False, r"heads are 20 wide, and vLLM takes multiples of 8"),
        (264, ParallelLayout(), False, r"heads are 264 wide, and vLLM takes multiples of 8 up to 256"),
        (32, ParallelLayout(p=2, generation=Generation(p=2)), True, r"p=2: .*\.parallel\.generate\.p 1"),
        (32, ParallelLayout(t=8), True, r"t=8: .* 4 attention heads"),
    ],
)
def test_what_vllm_does_not_take_is_refused(
    head_dim: int, layout: ParallelLayout, on_cpu: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_vllm(model(head_dim), layout, on_cpu=on_cpu)


def test_heads_on_a_cpu_are_as_wide_as_vllm_says() -> None:
    assert list(config._CPU_HEADS) == CPUAttentionBackend.get_supported_head_sizes()


SIZES: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 128,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mixtral", {"num_local_experts": 4}, r"is a mixture of 4 experts, whose"),
        ("flex_olmo", {"num_experts": 4}, r"is a mixture of 4 experts, whose"),
        ("qwen3_moe", {"num_experts": 4, "attention_bias": True}, r"is a mixture of .* attention_bias=True,"),
        ("qwen2_moe", {"num_experts": 4, "use_sliding_window": True}, r".* with use_sliding_window=True,"),
        ("olmoe", {"num_experts": 4, "clip_qkv": 0.5}, r"is a mixture of .* with clip_qkv=0.5, which vLLM"),
        ("granitemoe", {"num_local_experts": 4, "hidden_act": "gelu"}, r".* with hidden_act=gelu,"),
        ("olmoe", {"num_experts": 4, "norm_topk_prob": True}, r".* with norm_topk_prob=True, which vLLM"),
        ("olmoe", {"num_experts": 4, "rms_norm_eps": 1e-6}, r".* with rms_norm_eps=1e-06, which vLLM"),
        ("gpt2", {"scale_attn_weights": False}, r"has scale_attn_weights=False, which vLLM"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, r"has scale_attn_by_inverse_layer_idx=True, .*"),
        ("gpt2", {"reorder_and_upcast_attn": True}, r"has reorder_and_upcast_attn=True, which vLLM"),
        ("qwen3", {"attention_bias": True}, r"has attention_bias=True, which vLLM"),
        ("gemma", {"attention_bias": True}, r"has attention_bias=True, which vLLM"),
        ("gemma", {"hidden_act": "relu"}, r"has hidden_act=relu, which vLLM"),
        ("cohere", {"hidden_act": "gelu"}, r"has hidden_act=gelu, which vLLM"),
        ("cohere2", {"hidden_act": "gelu"}, r"has hidden_act=gelu, which vLLM"),
        ("cohere", {"attention_bias": True}, r"has attention_bias=True, which vLLM"),
        ("cohere2", {"attention_bias": True}, r"has attention_bias=True, which vLLM"),
        ("cohere", {"tie_word_embeddings": False}, r"has tie_word_embeddings=False, which vLLM"),
        ("cohere2", {"tie_word_embeddings": False}, r"has tie_word_embeddings=False, which vLLM"),
        ("ernie4_5", {"use_bias": True}, r"has use_bias=True, which vLLM"),
        ("glm4_moe", {"n_routed_experts": 4}, r"is a mixture of 4 experts, whose"),
        ("deepseek_v3", {"n_routed_experts": 4}, "is a mixture of 4 experts, whose"),
        ("gemma4_text", {}, r"computes with model\.layers\.0\.layer_scalar, which is a buffer, and"),
        ("apertus", {}, r"computes with model\.layers\.0\.mlp\.act_fn\.beta, which is a buffer, and"),
    ],
)
def test_models_that_vllm_would_compute_with_other_weights_are_refused(
    kind: str, options: dict[str, Any], message: str
) -> None:
    config = AutoConfig.for_model(kind, **SIZES, **options)
    with pytest.raises(ValueError, match=rf"the model {message} .*Take generator=native, or another model"):
        check_vllm(config, ParallelLayout(), on_cpu=True)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"num_experts": 1}),
        ("llama", {"attention_bias": True}),
        ("gemma3_text", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("minicpm3", {}),
        ("olmoe", {"num_experts": 4}),
    ],
)
def test_models_whose_weights_vllm_computes_with_are_not_refused(kind: str, options: dict[str, Any]) -> None:
    check_vllm(AutoConfig.for_model(kind, **SIZES, **options), ParallelLayout(), on_cpu=True)


def test_windows_that_vllm_takes_wider_are_refused_for_rows_that_are_longer() -> None:
    config = AutoConfig.for_model("cohere2", **SIZES, sliding_window=48)
    check_vllm(config, ParallelLayout(), settings=VLLM(max_model_len=48), on_cpu=True)
    said = r"sees 48 tokens in training and 49 in vLLM, and rows may have 64\. Type .*max_model_len 48, or"
    with pytest.raises(ValueError, match=said):
        check_vllm(config, ParallelLayout(), on_cpu=True)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_of_some_layers_are_refused(kind: str) -> None:
    options: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "use_sliding_window": True}
    check_vllm(AutoConfig.for_model(kind, **options, max_window_layers=0), ParallelLayout(), on_cpu=True)
    with pytest.raises(
        ValueError, match=rf"some layers of this {kind} have windows, .*Take generator=native"
    ):
        check_vllm(AutoConfig.for_model(kind, **options, max_window_layers=1), ParallelLayout(), on_cpu=True)


def test_what_vllm_takes_is_not_refused() -> None:
    check_vllm(model(), ParallelLayout(p=2, t=4, generation=Generation(p=1, t=2)), on_cpu=True)
    for head_dim in (16, 256):
        check_vllm(model(head_dim), ParallelLayout(), on_cpu=False)
    check_vllm(model(), ParallelLayout(), settings=VLLM(max_model_len=64), on_cpu=True)
    with pytest.raises(
        ValueError, match=r"^strategy.settings.vllm.max_model_len=65: the model has 64 positions"
    ):
        check_vllm(model(), ParallelLayout(), settings=VLLM(max_model_len=65), on_cpu=True)


def test_an_actor_is_checked_with_its_layout(tmp_path: Path) -> None:
    actor = Actor(path=generating.write(tmp_path).path)
    layout = ParallelLayout(p=2, generation=Generation(p=2))
    actor.check_layout(layout, Settings(engine="megatron"))
    with pytest.raises(ValueError, match=r"in one stage.*generate\.p 1, --strategy\.parallel\.p 1 where the"):
        actor.check_layout(layout, Settings(engine="megatron", generator="vllm"))
    longer = Settings(generator="vllm", vllm=VLLM(max_model_len=513))
    for role in (actor, Generator.of(actor)):
        with pytest.raises(ValueError, match="max_model_len=513: the model has 512 positions"):
            role.check_layout(ParallelLayout(), longer)


def test_a_cluster_with_gpus_computes_on_them_whatever_the_controller_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = Actor(path=str(tmp_path))
    model(head_dim=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="heads are 16 wide, and on a CPU vLLM takes"):
        actor.check_generation(ParallelLayout(), Settings(generator="vllm"))
    monkeypatch.setattr(workers.actor, "num_gpus", lambda: 8)
    actor.check_generation(ParallelLayout(), Settings(generator="vllm"))


class TwoActors(GRPO):
    """Beside the actor another answers."""

    judge: Actor = field(default_factory=Actor)
    """The other."""


class SelfPlay(SFT):
    """Learns from given answers beside those of its older self."""

    opponent: Opponent = field(default_factory=Opponent)
    """Draws."""


class SleepsOnce(Colocated):
    """The vLLM of the judge stays awake."""

    def settings_of(self, name: str) -> Settings:
        settings = super().settings_of(name)
        return replace(settings, vllm=VLLM(sleep=False)) if name == "judge" else settings


def test_vllm_sleeps_for_one_actor_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(strategy: Strategy, algorithm: GRPO) -> None:
        strategy.connect(algorithm)
        strategy.setup_environment()

    sleeps, awake = Settings(generator="vllm"), Settings(generator="vllm", vllm=VLLM(sleep=False))
    prepare(Colocated(settings=sleeps), TwoActors())
    monkeypatch.setattr(strategy_checks, "num_gpus", lambda: 4)
    said = r"^strategy\.settings\.generator=vllm: actor and judge answer on the same .*Type --strategy\."
    with pytest.raises(ValueError, match=rf"{said}settings\.vllm\.sleep false and .*auto in given pools"):
        prepare(Colocated(settings=sleeps), TwoActors())
    with pytest.raises(ValueError, match=rf"{said}settings\.generator native, or"):
        prepare(Colocated(settings=sleeps, offload=True), TwoActors())
    prepare(Colocated(settings=awake), TwoActors())
    prepare(Colocated(), TwoActors())
    prepare(SleepsOnce(settings=sleeps), TwoActors())
    prepare(Standalone(settings=sleeps), TwoActors())
    prepare(Colocated(settings=sleeps), GRPO())


def test_given_answers_do_not_keep_an_opponent_from_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws in each step, and the field `actor` in a validation of one's own."""
    monkeypatch.setattr(strategy_checks, "num_gpus", lambda: 4)
    strategy = Colocated(settings=Settings(generator="vllm"))
    strategy.connect(SelfPlay())
    with pytest.raises(ValueError, match=r"actor and opponent answer on the same GPUs"):
        strategy.setup_environment()


def test_a_prompt_is_computed_at_once_on_a_cpu() -> None:
    few = VLLM(max_num_batched_tokens=5, max_model_len=20)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=5: on a CPU .* takes 20 tokens\. Try 20"):
        check_vllm(model(), ParallelLayout(), settings=few, on_cpu=True)
    with pytest.raises(ValueError, match=r"takes 64 tokens"):
        check_vllm(model(), ParallelLayout(), settings=VLLM(max_num_batched_tokens=5), on_cpu=True)
    for enough in (VLLM(max_num_batched_tokens=20, max_model_len=20), VLLM(max_model_len=20)):
        check_vllm(model(), ParallelLayout(), settings=enough, on_cpu=True)
    check_vllm(model(head_dim=64), ParallelLayout(), settings=few, on_cpu=False)


def test_fewer_positions_than_a_held_out_prompt_and_its_answer_have(tmp_path: Path) -> None:
    for name, prompts in (("train", ["a"] * 4), ("val", ["b", "many more words than that, a sentence"])):
        lines = [json.dumps({"prompt": prompt, "answer": "x"}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    settings = Settings(generator="vllm", vllm=VLLM(max_model_len=30))
    run = Trainer(strategy=Started(settings=settings), logger=False, default_root_dir=tmp_path)
    algorithm = GRPO(actor=Actor(sampling=Sampling(max_new_tokens=8)), group_size=2)
    data = PromptData(batch_size=2, path=str(tmp_path / "train.jsonl"), val_path=str(tmp_path / "val.jsonl"))
    with pytest.raises(ValueError, match=r"max_model_len=30: the longest prompt has \d\d tokens"):
        run.fit(algorithm, datamodule=data)


@pytest.mark.parametrize(
    ("positions", "told"),
    [
        (20, r"max_model_len=20: the longest prompt has 13 tokens, and .*=8 come behind it\. Try 21, or 0"),
        (21, "started"),
        (0, "started"),
    ],
)
def test_fewer_positions_than_prompts_and_answers_have(positions: int, told: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, RuntimeError), match=told):
        fit(Started, positions, tmp_path)


def fit(strategy: type[Started | FewApart], positions: int, root: Path) -> None:
    """Run prompts of up to 13 tokens and answers of 8."""
    settings = Settings(generator="vllm", vllm=VLLM(max_model_len=positions))
    algorithm = GRPO(actor=Actor(sampling=Sampling(max_new_tokens=8)), group_size=2)
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=0)
    trainer(strategy(settings=settings), root).fit(algorithm, datamodule=data)


class Few(Started):
    """The actor has 20 positions."""

    def settings_of(self, name: str) -> Settings:
        return with_few(super().settings_of(name)) if name == "actor" else super().settings_of(name)


class FewApart(OpenRLHF):
    """The copy that generates has 20 positions."""

    def settings_of(self, name: str) -> Settings:
        return with_few(super().settings_of(name)) if name == "generator" else super().settings_of(name)

    def setup(self, trainer: Trainer) -> None:
        raise RuntimeError("started")


def with_few(settings: Settings) -> Settings:
    return replace(settings, vllm=VLLM(max_model_len=20))


@pytest.mark.parametrize("strategy", [Few, FewApart])
def test_what_generates_has_settings_of_its_own(strategy: type[Few | FewApart], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_model_len=20: the longest prompt has 13 tokens"):
        fit(strategy, 400, tmp_path)
