"""Each model is predicted as it computes itself: in its type, with its recomputation, adapters and host."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import pytest

from examples.written_verdict import WrittenVerdict
from rlhf_lightning.algos import PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP, VLLM, ZeRO
from rlhf_lightning.mapping import hardware, memory, shapes, simulate
from rlhf_lightning.mapping.dataflow import Dataflow, Stage, Work
from rlhf_lightning.mapping.observe import recipe
from rlhf_lightning.mapping.phases import Phase
from rlhf_lightning.mapping.plan import plan
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.mapping_inputs import read_recipes
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.spec import LoRA, Sampling
from rlhf_lightning.strategies import Auto
from rlhf_lightning.workers import Actor, Critic, Opponent, Reference, Settings
from tests.ranks.algos.test_opponents import Imitating
from tests.unit.mapping.simulated import flow_of
from tests.unit.mapping.test_search_auto import attached

ONE = ParallelLayout()
SEVEN = shapes.load("llama-7b")


def test_a_role_has_its_own_type_and_recomputation() -> None:
    """A critic follows the actor's path and type, not its recomputation; one of another path not its type."""
    strategy = attached(
        Auto(devices=1), PPO(actor=Actor(dtype="bfloat16", gradient_checkpointing=True), critic=Critic())
    )
    costs = strategy.plan(1).costs
    assert (costs.recipes["actor"].recompute, costs.recipes["critic"].recompute) == (True, False)
    assert {costs.recipes[name].element for name in ("actor", "critic", "reference")} == {2}
    trained = next(work for work in costs.work("critic")[-1] if work.kind == "train")
    work = replace(costs.recipes["critic"], batch=trained.rows, mini_batches=trained.calls)
    expected = memory.training(costs.shapes["critic"], ONE, work).total
    assert costs.used("critic", ONE, trained, 0.0) == pytest.approx(expected)
    changed = PPO(actor=Actor(dtype="bfloat16"), critic=Critic(path="elsewhere", gradient_checkpointing=True))
    found = read_recipes(changed, Settings(), costs.workload, costs.dataflow)["critic"]
    assert (found.element, found.masters, found.recompute) == (4, False, True)
    assert found.prompt == costs.workload.prompt


def test_a_second_model_that_writes_has_its_own_length() -> None:
    """A verdict is longer than the answer that it is about, and takes room and time accordingly."""
    long, short = (Actor(sampling=Sampling(max_new_tokens=count)) for count in (2048, 64))
    strategy = attached(Auto(devices=1), WrittenVerdict(actor=short, judge=long))
    costs = strategy.plan(1).costs
    assert {name: costs.recipes[name].response for name in ("actor", "judge")} == {"actor": 64, "judge": 2048}
    free, seconds, rows = 100e6, [], []
    for name in ("actor", "judge"):
        (work,) = [one for stage in costs.work(name) for one in stage if one.kind == "generate"]
        seconds.append(costs.estimate(name, ONE, work, free).seconds)
        rows.append(costs.rows_at_once(name, ONE, work, free))
    assert seconds[1] > 10 * seconds[0]
    prompt = costs.workload.prompt
    assert rows[1] == pytest.approx(rows[0] * (prompt + 64) / (prompt + 2048), abs=1)


def test_an_opponent_of_given_answers_has_the_length_of_its_own() -> None:
    """The actor reads what the data holds; its older self writes 300 tokens."""
    algorithm = Imitating(opponent=Opponent(sampling=Sampling(max_new_tokens=300)))
    strategy = attached(Auto(devices=1), algorithm)
    algorithm.trainer.datamodule = data = TaskData(batch_size=8, num_rows=8, completions=True)  # type: ignore[attr-defined]
    data.trainer = algorithm.trainer
    found = strategy.plan(1).costs.recipes
    assert (found["opponent"].response, found["opponent"].lengths) == (300, ())
    assert found["actor"].response == max(found["actor"].lengths) == max(data.response_lengths) < 300


def test_models_of_one_shape_that_compute_in_two_ways_are_two() -> None:
    work = Workload(batch=64)
    keeping = {"critic": replace(work, recompute=False)}
    models = dict.fromkeys(("actor", "critic", "reference", "reward"), SEVEN)
    costs = SimulatedCosts(hardware.A100, flow_of(64), models, workload=work, recipes=keeping)
    same = SimulatedCosts(hardware.A100, flow_of(64), models, workload=work)
    assert same.working("critic", ONE) < costs.working("critic", ONE) - 10e9
    assert costs.signature("critic") != same.signature("critic")
    assert costs.signature("reward") == costs.signature("reference")


def test_what_is_missing_is_that_of_each_recipe() -> None:
    """A reference in float32 takes 27 GB; with the actor's type it would be counted with 13.5."""
    work = Workload(batch=8, sharding="none")
    models = {"reference": SEVEN}
    flow = Dataflow((Stage("preparation", (Work("reference", "infer", 8, 1),)),))
    small = replace(hardware.A100, memory_bytes=20e9, gpus_per_node=1)
    costs = SimulatedCosts(
        small, flow, models, workload=work, recipes={"reference": replace(work, element=4)}
    )
    with pytest.raises(ValueError, match=r"need at least (2[7-9]|3\d)\.\d GB"):
        plan(costs, 1)


ADAPTERS = 32 * 16 * (8 * 4096 + 3 * (4096 + 11008))
"""Numbers of adapters of rank 16 for `SEVEN`: (in + out) x rank for each of the seven products of a layer."""


def test_adapters_alone_have_gradients_states_and_masters() -> None:
    """Of a 7B model in bfloat16: 2 N of weights and 16 bytes a number of the adapters in an update."""
    spec = Actor(dtype="bfloat16", lora=LoRA(rank=16))
    for sharding, shared in ((FSDP(), 1), (FSDP(), 4), (FSDP(shard=1), 4)):
        work = recipe(spec, Settings(train=sharding))
        kept = replace(work, kept_tokens=0, keeps_gradients=True)
        found = memory.footprint(SEVEN, ParallelLayout(d=shared), kept, trained=True)
        resident = found.parameters + found.gradients + found.states
        over = 1 if sharding.shard == 1 else shared
        frozen = 0 if over > 1 else ADAPTERS
        count = SEVEN.num_parameters - ADAPTERS + frozen
        assert resident == pytest.approx((2 * count + 16 * ADAPTERS) / over), (sharding, shared)
        assert resident < 15e9


def test_adapters_take_less_time() -> None:
    """Two thirds of the products, and next to no optimizer, nor traffic of gradients."""
    whole = Workload(batch=8, mini_batches=1, sharding="none", recompute=False)
    few = replace(whole, lora_rank=16)
    layout = ParallelLayout(d=2)
    all_of_it, adapters = (simulate.train(hardware.A100, SEVEN, layout, w).parts for w in (whole, few))
    attention = 3.5 * 4 * 2048 * SEVEN.layers * 2 * SEVEN.query_width * 2048
    attention /= hardware.A100.efficiency.attention * hardware.A100.peak_flops
    products = all_of_it["compute"] - attention
    assert adapters["compute"] - attention == pytest.approx(2 / 3 * products, rel=1e-3)
    assert adapters["intra-node network"] < 0.01 * all_of_it["intra-node network"]
    assert adapters["memory bandwidth"] < all_of_it["memory bandwidth"]


def test_what_zero_keeps_on_the_host_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_lightning.engines.ZeRO.require", lambda _: None)  # DeepSpeed is an extra

    def parts(zero: ZeRO) -> memory.Parts:
        work = recipe(Actor(dtype="bfloat16"), Settings(engine="zero", zero=zero))
        return memory.training(SEVEN, ParallelLayout(d=4), work)

    count = SEVEN.num_parameters
    second = parts(ZeRO(stage=2, offload_optimizer=True))
    assert (second.parameters, second.gradients, second.states) == (2 * count, count, 0)
    third = parts(ZeRO(stage=3, offload_optimizer=True))
    assert (third.parameters, third.gradients, third.states) == (count / 2, 0, 0)
    away = parts(ZeRO(stage=3, offload_optimizer=True, offload_parameters=True))
    assert (away.parameters, away.states) == (0, 0)
    assert away.buffers == 4 * SEVEN.layer_parameters
    beside = Settings(engine="zero", zero=ZeRO(stage=3, offload_parameters=True))
    frozen = recipe(Reference(dtype="bfloat16"), beside)
    assert memory.inference(SEVEN, ParallelLayout(d=4), frozen).parameters == 0


@pytest.mark.parametrize(
    ("stage", "half", "single"),
    [(1, 2 + 4 + 12 / 4, 4 + 4 + 12 / 4), (2, 2 + 16 / 4, 4 + 16 / 4), (3, 18 / 4, 20 / 4)],
)
def test_zero_has_masters_beside_the_parameters(
    monkeypatch: pytest.MonkeyPatch, stage: Literal[1, 2, 3], half: float, single: float
) -> None:
    """Bytes a number on each of four ranks, as docs/deepspeed.md has them."""
    monkeypatch.setattr("rlhf_lightning.engines.ZeRO.require", lambda _: None)
    settings = Settings(engine="zero", zero=ZeRO(stage=stage))
    for role, bytes_each in ((Actor(dtype="bfloat16"), half), (Actor(), single)):
        found = memory.footprint(SEVEN, ParallelLayout(d=4), recipe(role, settings), trained=True)
        assert found.total == bytes_each * SEVEN.num_parameters


@pytest.mark.parametrize("engine", ["fsdp", "megatron", "zero"])
def test_a_reference_that_follows_has_masters(
    monkeypatch: pytest.MonkeyPatch, engine: Literal["fsdp", "megatron", "zero"]
) -> None:
    monkeypatch.setattr("rlhf_lightning.engines.ZeRO.require", lambda _: None)
    for decay, bytes_each in ((None, 2), (0.9, 6)):
        work = recipe(Reference(dtype="bfloat16", decay=decay), Settings(engine=engine))
        found = memory.footprint(SEVEN, ONE, work, trained=False)
        assert found.total == bytes_each * SEVEN.num_parameters


def with_vllm(monkeypatch: pytest.MonkeyPatch, gpus: int, vllm: VLLM | None = None) -> Workload:
    """The recipe of an actor in bfloat16 that Megatron trains and vLLM generates with."""
    monkeypatch.setattr("rlhf_lightning.workers.settings.require_vllm", lambda: None)
    monkeypatch.setattr("rlhf_lightning.mapping.observe.num_gpus", lambda: gpus)
    settings = Settings(engine="megatron", generator="vllm", vllm=vllm or VLLM())
    return recipe(Actor(dtype="bfloat16"), settings)


def test_vllm_has_a_copy_of_the_weights_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    work = with_vllm(monkeypatch, 2)
    native = recipe(Actor(dtype="bfloat16"), Settings(engine="megatron"))
    assert memory.generation(SEVEN, ONE, work).parameters == 2 * SEVEN.num_parameters
    assert memory.generation(SEVEN, ONE, native).parameters == 0
    assert with_vllm(monkeypatch, 0).held_once
    assert not with_vllm(monkeypatch, 0, VLLM(zero_copy=False)).held_once


def test_vllm_keeps_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GB 32 GB, of which weights take 13.5, or as many GiB as were asked for, though more is free."""
    (work,) = flow_of(512, roles=("actor",)).stages[0].work
    device = hardware.A100.memory_bytes

    def room(recipe: Workload) -> tuple[float, int]:
        whole = replace(recipe, prompt=1024, response=1024, real_prompt=1024)
        flow = Dataflow((Stage("generation", (work,)),))
        costs = SimulatedCosts(hardware.A100, flow, {"actor": SEVEN}, workload=whole)
        return costs.kv_bytes("actor", ONE, work, 1e15), costs.rows_at_once("actor", ONE, work, 1e15)

    row = 2 * 2 * 32 * 4096 * 2048
    kept, rows = room(with_vllm(monkeypatch, 1))
    assert 0.3 * (0.4 * device - 2 * SEVEN.num_parameters) < kept < 0.4 * device - 2 * SEVEN.num_parameters
    assert kept / row - 2 < rows < 20
    wider, _ = room(with_vllm(monkeypatch, 1, VLLM(gpu_memory_utilization=0.8)))
    assert wider > 2 * kept
    asked, rows = room(with_vllm(monkeypatch, 1, VLLM(kv_cache_gib=4.0)))
    assert 2 * 2**30 < asked <= 4.01 * 2**30
    assert rows == 4 * 2**30 // row
    _, rows = room(with_vllm(monkeypatch, 0))
    assert rows == 1, "a GiB on a CPU has one row of this width"
    native = replace(with_vllm(monkeypatch, 1), generation_share=1.0, reserves=False)
    assert room(native)[0] > 256 * row * 0.99


@pytest.mark.parametrize(
    ("vllm", "fits"),
    [
        (VLLM(gpu_memory_utilization=0.15), False),
        (VLLM(gpu_memory_utilization=0.3), True),
        (VLLM(gpu_memory_utilization=0.15, kv_cache_gib=4.0), True),
    ],
)
def test_vllm_does_not_start_where_its_share_has_no_room_for_weights(
    monkeypatch: pytest.MonkeyPatch, vllm: VLLM, *, fits: bool
) -> None:
    """They take 13.5 GB, and the share is 12 of 80; with a size of its own for the cache it is not asked."""
    work = with_vllm(monkeypatch, 1, vllm)
    flow = Dataflow((Stage("generation", (Work("actor", "generate", 64, 1),)),))
    costs = SimulatedCosts(hardware.A100, flow, {"actor": SEVEN}, workload=work)
    other = r"Try another strategy\.settings\.vllm\.gpu_memory_utilization than 0\.15 \(smaller where .* or"
    with nullcontext() if fits else pytest.raises(ValueError, match=rf"vLLM does not start: .* {other}"):
        assert plan(costs, 1).mappings
    ran = simulate_generation(replace(work, batch=64, mini_batches=1))
    assert math.isfinite(ran), "a run that was measured had room"


def test_a_run_with_vllm_is_predicted_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = (with_vllm(monkeypatch, 1, VLLM(kv_cache_gib=gib)) for gib in (2.0, 60.0))
    seconds = []
    for work in (narrow, wide):
        call = replace(work, prompt=1024, response=1024, batch=64, mini_batches=1)
        seconds.append(simulate_generation(call))
    assert seconds[0] > 2 * seconds[1]


def simulate_generation(work: Workload) -> float:
    """Seconds of a generation as a run's are predicted."""
    one = Phase(
        role="actor", method="generate_sequences", kind="generate", calls=1, seconds=1.0, devices=(0,),
        shape=SEVEN, layout=ONE, workload=work,
    )  # fmt: skip
    return one.predict(hardware.A100)
