"""When weights are copied into vLLM, what is forgotten then, and what it leaves in memory and process."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from vllm.distributed import parallel_state
from vllm.v1.engine import core
from vllm.v1.request import Request

from rlhf_lightning.engines import VLLM, FSDPEngine
from rlhf_lightning.engines.sampling import uniform
from rlhf_lightning.engines.vllm.engine import VLLMEngine, _Logits
from rlhf_lightning.engines.vllm.memory import release_pages
from rlhf_lightning.engines.vllm.requests import RunningRequests, _row
from rlhf_lightning.engines.vllm.responses import begun_responses
from rlhf_lightning.spec import ModelSpec, Sampling
from rlhf_lightning.workers import Actor, Generator
from tests.extras import generating
from tests.extras.generating import EXACT, SMALL, TOKENIZER, prompts, vllm_of
from tests.unit.engines.decoders import agree, table
from tests.unit.parallel.memory import resident_bytes

BLOCK = 128
"""Tokens in a block of vLLM's prefix cache on a CPU: a shorter prompt is never found in it."""
SEQUENCES = prompts([2 * BLOCK + 9, 40])
DRAWN = Sampling(max_new_tokens=8)


class Watched(FSDPEngine):
    """Counts how often its weights are asked for."""

    asked = 0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.asked += 1
        return super().weights()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return generating.write(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def awake(spec: ModelSpec) -> Iterator[tuple[Watched, VLLMEngine]]:
    """An engine that keeps keys and values between generations."""
    source = Watched(spec)
    engine = vllm_of(source, spec, replace(SMALL, sleep=False))
    yield source, engine
    engine.close()


def test_keys_and_values_of_old_weights_are_forgotten(
    awake: tuple[Watched, VLLMEngine], tmp_path: Path
) -> None:
    source, engine = awake
    engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    generating.learn(source, prompts([5, 3]))
    out = engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    expected = generating.judged(generating.exported(source, tmp_path), SEQUENCES, out, DRAWN)
    torch.testing.assert_close(out["log_probs"], expected, atol=EXACT, rtol=0)


def test_weights_are_copied_only_once_they_have_changed(awake: tuple[Watched, VLLMEngine]) -> None:
    source, engine = awake
    generating.learn(source, prompts([5]))
    before = source.asked
    first = engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    agree(engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1), first)
    assert source.asked == before + 1
    assert engine.version == source.version
    generating.learn(source, prompts([5]))
    engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    assert source.asked == before + 2
    assert engine.version == source.version


def test_vllm_knows_the_version_of_each_answer(awake: tuple[Watched, VLLMEngine]) -> None:
    source, engine = awake
    generating.learn(source, prompts([5]))
    engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    assert engine._engine.get_weight_version() == str(source.version)


def test_vllm_has_the_weights_in_memory_of_its_own(awake: tuple[Watched, VLLMEngine]) -> None:
    source, engine = awake
    engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    ours = {weight.untyped_storage().data_ptr() for _, weight in source.weights()}
    assert ours.isdisjoint(p.untyped_storage().data_ptr() for p in engine._model.parameters())


def test_each_position_is_drawn_with_a_seed_of_its_own(
    awake: tuple[Watched, VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, seen = RunningRequests.seed, list[list[int]]()

    def watched(running: RunningRequests) -> None:
        seed(running)
        generators = running._runner.input_batch.generators.values()
        seen.append(sorted(generator.initial_seed() for generator in generators))

    monkeypatch.setattr(RunningRequests, "seed", watched)
    awake[1].generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    numbers = uniform(1, torch.tensor([[100], [101]]), torch.arange(DRAWN.max_new_tokens))
    assert seen == [sorted(place) for place in (numbers * 2**48).long().T.tolist()]
    seen.clear()
    awake[1].resume(table(SEQUENCES), sampling=DRAWN, seed=1, pause=lambda ended: False, at_once=1)
    assert {len(rows) for rows in seen} == {1}


@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "paused"])
def test_rows_leave_in_an_order_that_the_ranks_of_a_copy_share(
    stops: bool, awake: tuple[Watched, VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was freed first is evicted first, and ranks that evict others schedule otherwise."""
    engine, rows = awake[1], table(prompts([5]) * 16)
    greedy = Sampling(max_new_tokens=4, temperature=0)
    said = engine.generate(rows[:1], sampling=greedy, seed=1)["response_ids"][0, :1]
    scheduler, freed = engine._engine.engine_core.engine_core.scheduler, list[int]()
    free = scheduler.kv_cache_manager.free

    def watched(request: Request) -> None:
        freed.append(_row(request.request_id))
        free(request)

    monkeypatch.setattr(scheduler.kv_cache_manager, "free", watched)
    text = (str(TOKENIZER.decode(said)),) if stops else ()
    found = engine.resume(
        rows,
        sampling=replace(greedy, stop_strings=text),
        seed=1,
        pause=lambda _: not stops and engine._engine.has_unfinished_requests(),
    )
    assert found["ended"].tolist() == [stops] * 16
    assert found["response_mask"].sum(1).tolist() == [1] * 16
    assert freed == [*range(16)]


def test_an_interrupted_generation_leaves_no_request(
    awake: tuple[Watched, VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = awake
    expected = engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    step, steps = engine._engine.step, iter(range(3))

    def interrupted() -> object:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    assert not engine._engine.has_unfinished_requests()
    agree(engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1), expected)


def test_sleep_gives_the_memory_of_keys_and_values_back(spec: ModelSpec) -> None:
    source = Watched(spec)
    engine = vllm_of(source, spec, VLLM(kv_cache_gib=0.25, max_num_seqs=128, sleep=False))
    sequences = prompts([400] * 100, seed=4)
    first = engine.generate(table(sequences), sampling=Sampling(max_new_tokens=2), seed=1)
    written = 100 * 400 * 2 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, their size, bytes
    before = resident_bytes()
    engine.offload()
    freed = before - resident_bytes()
    assert written * 0.9 < freed < 0.3 * 2**30
    agree(engine.generate(table(sequences), sampling=Sampling(max_new_tokens=2), seed=1), first)
    assert source.asked == 1
    engine.close()


@pytest.fixture
def told(awake: tuple[Watched, VLLMEngine], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What vLLM is told as on a GPU, where it sleeps; what it does there to its memory is done by hand."""
    (_, engine), calls = awake, list[str]()

    def sleep(*, level: int) -> None:
        calls.append(f"sleep {level}")
        for weight in engine._model.parameters():
            weight.data.zero_()

    engine.refresh()
    monkeypatch.setattr(engine, "_sleeps", True)
    monkeypatch.setattr(engine, "_config", replace(engine._config, sleep=True))
    monkeypatch.setattr(engine._engine, "sleep", sleep)
    monkeypatch.setattr(engine._engine, "wake_up", lambda: calls.append("wake"))
    return calls


def test_weights_that_slept_are_copied_again(awake: tuple[Watched, VLLMEngine], told: list[str]) -> None:
    (source, engine), start = awake, ["sleep 2"]
    expected = engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    before, version = source.asked, engine.version
    assert told == start
    for _ in range(2):
        engine.offload()
        engine.offload()
        agree(engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1), expected)
    engine.refresh()
    assert told == start + ["wake", "sleep 2"] * 2 + ["wake"]
    assert (source.asked, engine.version) == (before + 3, version)


def test_held_weights_are_taken_once_and_sleep_in_the_end(
    awake: tuple[Watched, VLLMEngine], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source, engine), rows = awake, table(SEQUENCES)
    expected = engine.generate(rows, sampling=DRAWN, seed=1)
    before = source.asked
    with engine.weights_held():
        assert told == ["sleep 2", "wake"]
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_weights", None)  # lent again, those of copies with fewer turns would lack
            for _ in range(2):
                found = engine.resume(rows, sampling=DRAWN, seed=1, pause=lambda ended: False)
                agree(found, expected)
            agree(engine.generate(rows, sampling=DRAWN, seed=1), expected)
        assert told == ["sleep 2", "wake"]
    assert told == ["sleep 2", "wake", "sleep 2"]
    engine.resume(rows, sampling=DRAWN, seed=1, pause=lambda ended: False)
    assert told == ["sleep 2", *["wake", "sleep 2"] * 2]
    assert source.asked == before + 2


def test_an_actor_takes_its_vllm_along_and_a_copy_keeps_it(
    awake: tuple[Watched, VLLMEngine], spec: ModelSpec
) -> None:
    (source, engine), actor, copy = awake, Actor(path=spec.path), Generator.of(Actor(path=spec.path))
    copy.actor.binding.generator = actor.binding.generator = engine
    actor.binding.engine = source
    expected = engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    copy.offload()
    copy.reload()
    assert (copy.reload_bytes(), engine._asleep) == (0, False)
    assert all(cache.any() for cache in engine._runner.kv_caches)
    actor.offload()
    assert engine._asleep
    assert not any(cache.flatten()[1024:-1024].any() for cache in engine._runner.kv_caches)
    actor.reload()
    agree(engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1), expected)


def test_bfloat16_weights_follow_too(spec: ModelSpec) -> None:
    source = FSDPEngine(replace(spec, dtype="bfloat16"))
    engine = vllm_of(source, replace(spec, dtype="bfloat16"))
    for _ in range(2):
        generating.learn(source, prompts([5, 3]))
        answers = engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
        rows = TensorDict({**table(SEQUENCES), **answers}, batch_size=len(SEQUENCES))
        right = source.infer(rows, temperature=1.0)["log_probs"]
        # Activations of 8 bits, rounded in another order.
        torch.testing.assert_close(answers["log_probs"], right, atol=0.1, rtol=0)
    engine.close()


def test_forgotten_pages_hold_zeros_and_their_neighbours_stay() -> None:
    page = mmap.PAGESIZE
    around = mmap.mmap(-1, 2**22, flags=mmap.MAP_PRIVATE)
    everything = torch.frombuffer(around, dtype=torch.uint8).fill_(1)
    tensor = torch.frombuffer(around, dtype=torch.uint8, offset=64, count=2**22 - 128)
    before = resident_bytes()
    release_pages([tensor[:10], tensor[10:]])
    assert before - resident_bytes() > 3 * 2**20
    assert not everything[page:-page].any()
    assert everything[:page].all()
    assert everything[-page:].all()


@pytest.fixture
def products() -> Iterator[torch.backends.cuda.cuBLASModule]:
    """How a GPU multiplies float32: in TF32, set by the newer of torch's two options."""
    chosen, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    chosen.fp32_precision = "tf32"
    yield chosen
    chosen.fp32_precision = before


def test_it_sleeps_at_first_and_leaves_the_process_as_it_was(
    spec: ModelSpec, products: torch.backends.cuda.cuBLASModule
) -> None:
    torch.manual_seed(11)
    random.seed(11)
    set_num_threads, set_precision = torch.set_num_threads, torch.set_float32_matmul_precision
    environment = dict(os.environ)
    groups = {name: vars(parallel_state)[name] for name in ("_WORLD", "_TP", "_PP", "_DP")}
    state, draw = torch.get_rng_state(), random.getstate()
    engine = vllm_of(FSDPEngine(spec), spec)
    assert engine._asleep
    engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    engine.close()
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == draw
    assert torch.set_num_threads is set_num_threads
    assert torch.set_float32_matmul_precision is set_precision
    assert products.fp32_precision == "tf32"
    assert dict(os.environ) == environment
    assert {name: vars(parallel_state)[name] for name in groups} == groups


def test_the_world_is_not_vllms_to_end(awake: tuple[Watched, VLLMEngine], spec: ModelSpec) -> None:
    world, other = dist.group.WORLD, vllm_of(FSDPEngine(spec), spec)
    clean = core.cleanup_dist_env_and_memory
    other.close()
    assert dist.group.WORLD is world is not None
    assert core.cleanup_dist_env_and_memory is clean
    awake[1].generate(table(SEQUENCES), sampling=DRAWN, seed=1)


@pytest.mark.parametrize("room", [True, False], ids=["room", "no-room"])
def test_what_sleeps_wakes_up_before_it_ends(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, room: bool
) -> None:
    """On a GPU vLLM cannot free what is not mapped. A CPU's worker is asked the same, and does nothing."""
    engine, asked = vllm_of(FSDPEngine(spec), spec), list[str]()
    worker = engine._engine.model_executor.driver_worker.worker

    def noting(name: str, do: Callable[..., object]) -> Callable[..., object]:
        def noted(**given: object) -> object:
            asked.append(name)
            if name == "wake_up" and not room:
                raise RuntimeError("CUDA Error: out of memory")
            return do(**given)

        return noted

    for name in ("sleep", "wake_up", "shutdown"):
        monkeypatch.setattr(worker, name, noting(name, getattr(worker, name)))
    engine._sleeps = True
    engine.generate(table(SEQUENCES), sampling=DRAWN, seed=1)
    engine.close()
    assert asked == ["sleep", "wake_up", "shutdown"]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    ours = [line for line in warned if "(CUDA Error: out of memory). Another in this process may not" in line]
    assert len(ours) == (not room)


def test_responses_so_far_are_padded_as_the_engine_pads() -> None:
    said = torch.tensor([[5, 6, 9], [7, 9, 9]])
    columns = {"response_ids": said, "response_mask": said < 9, "log_probs": torch.zeros(2, 3)}
    rows = TensorDict({**columns, "ended": torch.zeros(2, dtype=torch.bool)}, batch_size=2)
    assert begun_responses(rows, pad=0)["response_ids"].tolist() == [[5, 6, 0], [7, 0, 0]]


def test_logits_are_divided_in_float32() -> None:
    logits = _Logits(lambda hidden: hidden.bfloat16())
    logits.temperature = 0.6
    found = logits(torch.tensor([[25.0, 24.875]]))
    assert found is not None
    torch.testing.assert_close(found, torch.tensor([[25.0, 24.875]]) / 0.6)
