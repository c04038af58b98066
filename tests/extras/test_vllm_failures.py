"""What the user reads when vLLM fails; and the engine goes on with its next call as if nothing had been."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, Olmo2Config
from vllm import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from rlhf_lightning.engines import VLLM, FSDPEngine, check_vllm, read_config
from rlhf_lightning.engines.vllm.engine import VLLMEngine
from rlhf_lightning.engines.vllm.failure import VLLMError
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.spec import ModelSpec, Sampling
from tests.extras import generating
from tests.extras.generating import POSITIONS, SMALL, prompts, vllm_of
from tests.unit.engines.decoders import agree, table

BLOCK = 128
"""Tokens in a block of vLLM's prefix cache on a CPU: only whole ones are found in it."""
SEQUENCES = prompts([2 * BLOCK + 9, 40, 3])
DRAWN = Sampling(max_new_tokens=6)
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return generating.write(tmp_path_factory.mktemp("model"))


def test_options_reach_vllm(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[EngineArgs] = []

    def note(arguments: EngineArgs) -> None:
        given.append(arguments)
        raise ValueError("seen")

    monkeypatch.setattr(LLMEngine, "from_engine_args", note)
    same = {"max_num_seqs": 7, "max_num_batched_tokens": 600}
    same |= {"max_model_len": 300, "enable_prefix_caching": False, "enforce_eager": False}
    sized = VLLM(gpu_memory_utilization=0.3, kv_cache_gib=0.5, **same)  # type: ignore[arg-type]
    with pytest.raises(VLLMError, match="seen"):
        vllm_of(FSDPEngine(spec), spec, sized)
    (found,) = given
    assert {name: getattr(found, name) for name in same} == same
    assert (found.kv_cache_memory_bytes, found.gpu_memory_utilization) == (2**29, 0.01)
    # On a CPU vLLM itself has it so.
    assert (found.async_scheduling, found.disable_custom_all_reduce) == (False, True)


def test_fewer_tokens_in_a_pass_than_rows_at_once_are_fewer_rows(
    spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(SMALL, max_model_len=8, max_num_batched_tokens=8)
    assert config.max_num_batched_tokens < SMALL.max_num_seqs
    check_vllm(read_config(spec), ParallelLayout(), settings=config, on_cpu=True)
    source, rows = FSDPEngine(spec), table(prompts([2] * 9))
    engine = vllm_of(source, spec, config)
    answers = engine.generate(rows, sampling=DRAWN, seed=1)
    engine.close()
    assert answers["response_mask"].all()
    assert "vLLM answers rows of at most" not in caplog.text, "as few as were asked for"


@pytest.fixture(scope="module")
def awake(spec: ModelSpec) -> Iterator[VLLMEngine]:
    """An engine that keeps keys and values between generations."""
    engine = vllm_of(FSDPEngine(spec), spec, replace(SMALL, sleep=False))
    yield engine
    engine.close()


class Fails:
    """Calls a function, but for one time, when it raises."""

    def __init__(self, owner: object, name: str, *, at: int, error: BaseException) -> None:
        self._call, self._left, self._error = getattr(owner, name), at, error

    def __call__(self, *given: object, **named: object) -> object:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return self._call(*given, **named)


PLACES = {
    "before anything is computed": ("_runner", "_update_states"),
    "in the forward pass": ("_runner", "_model_forward"),
    "before it draws": ("_engine.engine_core.engine_core.scheduler", "get_grammar_bitmask"),
    "after it drew": ("_runner", "_update_states_after_model_execute"),
}
"""Owner and name of a function that vLLM calls once a step."""


@pytest.mark.parametrize("at", [1, 3], ids=["first step", "third step"])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_inside_vllm_is_named_and_forgotten(
    awake: VLLMEngine, monkeypatch: pytest.MonkeyPatch, place: str, at: int
) -> None:
    awake._engine.reset_prefix_cache()
    expected = awake.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    awake._engine.reset_prefix_cache()
    owner, name = attrgetter(PLACES[place][0])(awake), PLACES[place][1]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Fails(owner, name, at=at, error=RuntimeError("broken on purpose.")))
        said = (
            r"^vLLM failed as it answered 3 rows: RuntimeError: broken on purpose\. VLLM_LOGGING_LEVEL=INFO"
        )
        with pytest.raises(VLLMError, match=said):
            awake.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    assert not awake._engine.has_unfinished_requests()
    agree(awake.generate(table(SEQUENCES), sampling=DRAWN, seed=1), expected)
    fewer = awake.generate(table(SEQUENCES[1:], first_id=101), sampling=DRAWN, seed=1)
    agree(fewer, expected[1:])


def test_an_interrupt_in_the_middle_is_passed_on_and_forgotten(
    awake: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = awake.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    with monkeypatch.context() as patch:
        fails = Fails(awake._runner, "_model_forward", at=2, error=KeyboardInterrupt())
        patch.setattr(awake._runner, "_model_forward", fails)
        with pytest.raises(KeyboardInterrupt):
            awake.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    agree(awake.generate(table(SEQUENCES), sampling=DRAWN, seed=1), expected)


def test_on_gpus_it_meets_no_other_ranks_and_opens_no_other_gpu(awake: VLLMEngine) -> None:
    config = awake._engine.vllm_config
    assert config.kernel_config.enable_flashinfer_autotune is False
    assert config.compilation_config.pass_config.fuse_allreduce_rms is False


def test_answers_that_nobody_waits_for_are_aborted(awake: VLLMEngine) -> None:
    ends = Sampling(max_new_tokens=40, stop_token_ids=generating.STOPS)
    expected = awake.generate(table(SEQUENCES), sampling=ends, seed=1)
    parts = awake.finished(table(SEQUENCES), sampling=ends, seed=1, parts=3)
    (first,), _ = next(iter(parts))
    assert awake._engine.has_unfinished_requests()
    parts.close()  # type: ignore[attr-defined]
    assert int(first) == int(expected["response_mask"].sum(dim=1).argmin())
    assert not awake._engine.has_unfinished_requests()
    agree(awake.generate(table(SEQUENCES), sampling=ends, seed=1), expected)


def test_a_lack_of_memory_says_which_options_take_it(
    awake: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            awake._runner,
            "_model_forward",
            Fails(awake._runner, "_model_forward", at=1, error=torch.OutOfMemoryError(FULL)),
        )
        said = r"OutOfMemoryError: CUDA out of memory.*less than strategy\.settings\.vllm\.kv_cache_gib=0\.02"
        with pytest.raises(VLLMError, match=said):
            awake.generate(table(SEQUENCES), sampling=DRAWN, seed=1)


def held(engine: VLLMEngine) -> None:
    with engine.weights_held():
        pass


USES: dict[str, Callable[[VLLMEngine], object]] = {
    "answers": lambda engine: engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1),
    "new weights": VLLMEngine.refresh,
    "held weights": held,
}


@pytest.mark.parametrize("use", USES.values(), ids=[*USES])
def test_memory_that_others_took_while_it_slept_is_missed_by_name(
    use: Callable[[VLLMEngine], object], awake: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(awake, "_sleeps", True)
        patch.setattr(awake, "_asleep", True)
        patch.setattr(awake._engine, "wake_up", lambda: None)  # a CPU has nothing to wake
        patch.setattr(
            awake._engine,
            "wake_up",
            Fails(awake._engine, "wake_up", at=1, error=torch.OutOfMemoryError(FULL)),
        )
        said = r"^vLLM failed as it woke up: OutOfMemoryError: CUDA out of.*Try less than strategy\.settings"
        with pytest.raises(VLLMError, match=said):
            use(awake)
        use(awake)
        assert not awake._asleep


@pytest.mark.parametrize("use", USES.values(), ids=[*USES])
def test_memory_that_weights_lack_as_they_are_copied_is_missed_by_name(
    use: Callable[[VLLMEngine], object], awake: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(awake, "_fresh", False)
        patch.setattr(
            awake.source, "weights", Fails(awake.source, "weights", at=1, error=torch.OutOfMemoryError(FULL))
        )
        said = (
            r"^vLLM failed as it took weights: OutOfMemoryError: CUDA out of.*Try less than strategy\.setti"
        )
        with pytest.raises(VLLMError, match=said):
            use(awake)
    use(awake)


@pytest.mark.parametrize(
    "config",
    [replace(SMALL, kv_cache_gib=1e-4), replace(SMALL, kv_cache_gib=5e-4, max_model_len=512)],
    ids=["not one token", "not one row"],
)
def test_a_cache_that_is_too_small_says_how_to_make_it_larger(spec: ModelSpec, config: VLLM) -> None:
    here = dist.is_initialized()
    gib = config.kv_cache_gib
    said = rf"^vLLM failed to start: ValueError: .*more than strategy\.settings\.vllm\.kv_cache_gib={gib}"
    with pytest.raises(VLLMError, match=said):
        vllm_of(FSDPEngine(spec), spec, config)
    assert dist.is_initialized() == here
    engine = vllm_of(FSDPEngine(spec), spec)
    engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    engine.close()


def test_a_cache_that_is_too_large_says_how_to_make_it_smaller(spec: ModelSpec) -> None:
    said = r"^vLLM failed to start: ValueError: .*less than strategy\.settings\.vllm\.kv_cache_gib=1000000"
    with pytest.raises(VLLMError, match=said):
        vllm_of(FSDPEngine(spec), spec, replace(SMALL, kv_cache_gib=1e6))


def test_a_cache_that_holds_no_row_of_the_models_length_is_named(
    spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    engine = vllm_of(FSDPEngine(spec), spec, replace(SMALL, kv_cache_gib=4e-4))
    positions = engine._engine.model_config.max_model_len
    assert 0 < positions < POSITIONS
    lacks = r"The model has 512 positions, .* try more than strategy\.settings\.vllm\.kv_cache_gib=0\.0004"
    (warned,) = (one.getMessage() for one in caplog.records if one.levelno == logging.WARNING)
    assert re.match(rf"vLLM answers rows of at most {positions} tokens\. {lacks}", warned)
    said = rf"^row 100: .* exceed the {positions} positions that vLLM has\. .* max_new_tokens\. {lacks}"
    with pytest.raises(ValueError, match=said):
        engine.generate(table(prompts([positions])), sampling=DRAWN, seed=1)
    with pytest.raises(ValueError, match=rf"max_new_tokens=512: vLLM has {positions} .* {lacks}"):
        engine.generate(table(prompts([3])), sampling=Sampling(max_new_tokens=POSITIONS), seed=1)
    engine.generate(table(prompts([positions - DRAWN.max_new_tokens])), sampling=DRAWN, seed=1)
    engine.close()


def test_positions_that_vllm_alone_sees_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It multiplies a model's positions by the factor of linear scaling; its files count that already."""
    scaled: Any = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    monkeypatch.setitem(generating.MODELS, "linear", LlamaConfig(**generating._SIZES, rope_parameters=scaled))
    spec = generating.write(tmp_path, "linear")
    engine = vllm_of(FSDPEngine(spec), spec, replace(SMALL, kv_cache_gib=8e-4))
    assert POSITIONS < engine._engine.model_config.max_model_len < 4 * POSITIONS
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]
    engine.close()


def test_weights_of_another_shape_and_missing_ones_are_refused_by_name(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = LlamaConfig(**{**generating._SIZES, "intermediate_size": 128}, tie_word_embeddings=False)
    monkeypatch.setitem(generating.MODELS, "wide", wide)
    engine = vllm_of(FSDPEngine(generating.write(tmp_path, "wide")), spec)
    name = r"model\.layers\.0\.mlp\.gate_proj\.weight"
    said = rf"^vLLM of {spec.path}: was given {name} \(128, 128\) and has \(96, 128\)"
    for use in USES.values():
        with pytest.raises(ValueError, match=said):
            use(engine)
    needs = f"^vLLM of {spec.path}: its LlamaForCausalLM needs"
    engine.source = source = FSDPEngine(spec)
    with monkeypatch.context() as patch:
        given = [pair for pair in source.weights() if pair[0] != "model.norm.weight"]
        patch.setattr(source, "weights", lambda: iter(given))
        with pytest.raises(ValueError, match=rf"{needs} model\.norm\.weight, which the trained model"):
            engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    engine._model.register_buffer("scalar", torch.ones(1))  # as vLLM has them of Gemma 4
    with pytest.raises(ValueError, match=rf"{needs} scalar, which the trained model does not have"):
        engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    del engine._model.scalar
    engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    assert engine.version == 0
    engine.close()


def test_a_model_that_vllm_has_not_itself_is_refused_as_it_is_made(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes them with the modules of transformers, which fail at the first generation."""
    here = dist.is_initialized()
    monkeypatch.setitem(generating.MODELS, "olmo2", Olmo2Config(**generating._SIZES))
    other = generating.write(tmp_path, "olmo2")
    said = r"^strategy\.settings\.generator=vllm: .* no olmo2 .*generator=native"
    with pytest.raises(ValueError, match=said):
        vllm_of(FSDPEngine(other), other)
    assert dist.is_initialized() == here
    engine = vllm_of(FSDPEngine(spec), spec)
    engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    engine.close()
