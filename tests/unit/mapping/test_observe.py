"""What the reports of an iteration's calls say of its work: kinds, rows of all replicas, calls, seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import CallReport, WorkerGroup
from rlhf_lightning.controller.device import Device
from rlhf_lightning.controller.in_process import InProcessTransport
from rlhf_lightning.engines import FSDP, VLLM, Megatron, ZeRO
from rlhf_lightning.mapping.observe import Lengths, count_calls, phases, recipe, shape_of
from rlhf_lightning.mapping.phases import Phase
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.workers import Actor, Generator, Reference, Settings

LENGTHS = Lengths(prompt=10.0, longest_prompt=16, responses=(4, 8))


def report(role: str, method: str, rank: int, rows: int, seconds: float = 1.0) -> CallReport:
    return CallReport(role, method, rank, 0.0, seconds, 0, None, num_rows=rows)


def observed(
    reports: list[CallReport], layout: ParallelLayout, actor: Actor | None = None
) -> dict[str, Phase]:
    algorithm = PPO(actor=actor or Actor())
    group = WorkerGroup("any", InProcessTransport(Device(0)), layout, tuple(range(4, 4 + layout.num_ranks)))
    roles = {name: role.following(algorithm.actor) for name, role in algorithm.roles().items()}
    roles["generator"] = Generator.of(algorithm.actor)
    models = {name: shape_of(role) for name, role in roles.items() if role.path}
    workers = dict.fromkeys(roles, group)
    found = phases(
        reports, roles, workers, models=models, settings=dict.fromkeys(roles, Settings()), lengths=LENGTHS
    )
    return {phase.name: phase for phase in found}


def test_calls_of_all_ranks_become_a_phase() -> None:
    """Seven rows of two mini-batches on two replicas: rank 0 has four of each, rank 1 three."""
    reports = [
        *(report("actor", "update_actor", rank, rows, 0.5 + rank) for rank, rows in ((0, 4), (1, 3)) * 2),
        *(report("critic", "compute_values", rank, 7, 0.25) for rank in (0, 1)),
    ]
    found = observed(reports, ParallelLayout(d=2))
    update, values = found["actor.update_actor"], found["critic.compute_values"]
    assert (update.kind, update.calls, update.workload.batch, update.seconds) == ("train", 2, 8, 3.0)
    assert update.workload.mini_batches == 1  # of each call
    assert (values.kind, values.calls, values.workload.batch, values.seconds) == ("infer", 1, 14, 0.25)
    assert (update.shape.head, values.shape.head) == ("lm", "scalar")
    assert update.devices == (4, 5)
    assert (update.workload.prompt, update.workload.prompt_tokens, update.workload.lengths) == (
        16,
        10,
        (4, 8),
    )
    saved = [report("actor", "save", rank, 0) for rank in (0, 1)]
    assert count_calls([*reports, *saved]) == 3
    assert count_calls([*reports[:3], *reports[4:]]) == 3  # in one of them rank 1 had no rows


def test_replicas_of_a_generation() -> None:
    """Each replica of four tensor shards generates with two copies in two shards: four copies in all."""
    layout = ParallelLayout(t=4, d=2, generation=Generation(t=2))
    reports = [report("actor", "generate_sequences", rank, 3) for rank in range(8)]
    (found,) = observed(reports, layout, Actor(recompute_log_probs=True)).values()
    assert (found.kind, found.workload.batch, found.rescored) == ("generate", 12, True)


def test_a_generator_is_a_model_of_its_own() -> None:
    """Every rank has all its weights, and none of them rescores."""
    reports = [report("generator", "generate_sequences", rank, 5) for rank in (0, 1)]
    reports += [report("generator", "receive_weights", 0, 0), report("actor", "send_weights", 0, 0)]
    found = observed(reports, ParallelLayout(d=2), Actor(recompute_log_probs=True))
    (answers,) = found.values()
    assert (answers.name, answers.workload.batch) == ("generator.generate_sequences", 10)
    assert (answers.workload.sharding, answers.rescored) == ("none", False)


@pytest.mark.parametrize(
    ("role", "method"),
    [
        ("reward", "compute_reward"),  # functions only
        ("actor", "accumulate_actor"),  # rows of other text
        ("actor", "compute_advantage"),
        ("actor", "give_weights"),
        ("actor", "save"),
        ("reference", "follow"),
        ("generator", "start_sequences"),  # a generation in parts: each is a call of its own
        ("generator", "next_sequences"),
        ("generator", "hold_sequences"),  # partial rollouts: some answers began in other iterations
        ("generator", "carry_sequences"),
        ("actor", "unheard_of"),
        ("nobody", "compute_values"),
    ],
)
def test_what_runs_no_model_over_the_rows_is_left_out(role: str, method: str) -> None:
    kept = report("critic", "update_critic", 0, 8)
    assert list(observed([report(role, method, 0, 8), kept], ParallelLayout())) == ["critic.update_critic"]


def test_ranks_without_rows() -> None:
    assert observed([report("actor", "update_actor", 0, 0)], ParallelLayout()) == {}


@pytest.mark.parametrize(
    ("rows", "mean", "longest", "truncated"),
    [(64, 7.28, 19, 0.0), (1024, 300.0, 512, 0.25), (8, 5.0, 5, 1.0), (1, 3.0, 3, 0.0), (40, 1.0, 1, 0.0)],
)
def test_lengths_keep_mean_maximum_and_the_truncated(
    rows: int, mean: float, longest: float, truncated: float
) -> None:
    found = Lengths.of([3, 5], rows=rows, mean=mean, longest=longest, truncated=truncated)
    assert (found.prompt, found.longest_prompt) == (4, 5)
    assert sum(found.responses) / len(found.responses) == pytest.approx(mean, abs=0.5 / len(found.responses))
    assert max(found.responses) == longest
    assert min(found.responses) >= 1
    share = sum(length == longest for length in found.responses) / len(found.responses)
    assert share == pytest.approx(truncated, abs=1 / len(found.responses)) or mean == longest


def test_recipes_of_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus = FSDP(reshard_after_forward=True, defer_gradient_reduction=False)
    assert recipe(Actor(), Settings()).sharding == "full"
    schedules = [recipe(Actor(), one) for one in (Settings(), Settings(train=on_gpus))]
    assert [(one.reshards, one.defers) for one in schedules] == [(False, True), (True, False)]
    assert recipe(Actor(), Settings(train=FSDP(shard=1))).sharding == "none"
    keeping = Settings(train=FSDP(kept_tokens=64))
    assert (recipe(Actor(), keeping).kept_tokens, recipe(Reference(), keeping).kept_tokens) == (64, 0)
    megatron = Settings(engine="megatron", megatron=Megatron(sequence_parallel=True))
    assert recipe(Actor(), megatron).sharding == "none"
    assert recipe(Actor(), megatron).sequence_parallel
    divided = replace(megatron, megatron=Megatron(distributed_optimizer=True, max_tokens_per_micro_batch=99))
    assert recipe(Actor(), divided).sharding == "states"
    assert not recipe(Actor(), divided).held_once
    assert recipe(Actor(), megatron).held_once
    assert recipe(Actor(), divided).micro_batch_tokens == 99
    monkeypatch.setattr("rlhf_lightning.engines.ZeRO.require", lambda _: None)  # DeepSpeed is an extra
    zero = [recipe(Actor(), Settings(engine="zero", zero=ZeRO(stage=stage))) for stage in (1, 2, 3)]
    assert [one.sharding for one in zero] == ["states", "gradients", "full"]
    assert {(one.reshards, one.defers) for one in zero} == {(True, False)}
    monkeypatch.setattr("rlhf_lightning.workers.settings.require_vllm", lambda: None)
    other = recipe(Actor(), Settings(generator="vllm", vllm=VLLM(max_num_seqs=7)))
    assert (other.max_resident, other.one_stage) == (7, True)
    assert not recipe(Actor(), Settings()).one_stage
    half = recipe(Actor(dtype="bfloat16", gradient_checkpointing=True), Settings())
    assert (half.element, half.masters, half.recompute) == (2, True, True)
