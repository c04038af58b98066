"""What an error of a GPU without memory advises: the options of the role that lacks it, but those it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from rlhf_lightning.controller import Worker, WorkerError
from rlhf_lightning.controller.device import Device, Placement
from rlhf_lightning.engines import FSDP, Megatron, TrainConfig, ZeRO
from rlhf_lightning.parallel import Generation, ParallelLayout, World
from rlhf_lightning.spec import LoRA
from rlhf_lightning.workers import Actor, Critic, Generator, Reference, Reward, Role, Settings

KEPT = "--strategy.settings.train.kept_tokens"
SHARD = "--strategy.settings.train.shard"
Kind = Literal["fsdp", "megatron", "zero"]
WHOLE = [
    "--strategy hybrid3d with --strategy.parallel.t and --strategy.parallel.generate.t above 1",
    "larger GPUs, since here each holds all of the actor to generate",
]
OFFLOAD = "--strategy.settings.zero.offload_optimizer true"
TOKENS = "--strategy.settings.train.max_tokens_per_micro_batch below 16384"


def advice(role: Role, method: str, *, settings: Settings, layout: ParallelLayout, name: str) -> list[str]:
    """Of a role whose part was to be built on a device."""
    role.binding.worker = Worker(0, layout, torch.device("cpu"), None, None, settings=settings, role=name)
    return [*role.takes_less(method)]


@pytest.mark.parametrize(
    ("name", "role", "method", "said"),
    [
        (
            "actor",
            Actor(),
            "update_actor",
            ["--algo.actor.gradient_checkpointing true", "--algo.actor.dtype bfloat16", TOKENS],
        ),
        ("actor", Actor(dtype="bfloat16", gradient_checkpointing=True), "update_actor", [TOKENS]),
        ("actor", Actor(dtype="bfloat16"), "compute_log_prob", [TOKENS]),
        (
            "cost_critic",
            Critic(path="embedded", dtype="bfloat16"),
            "update_critic",
            ["--algo.cost_critic.gradient_checkpointing true", TOKENS],
        ),
        (
            "reference",
            Reference(path="embedded"),
            "compute_ref_log_prob",
            ["--algo.reference.dtype bfloat16", TOKENS],
        ),
        ("reference", Reference(path="embedded"), "build", ["--algo.reference.dtype bfloat16"]),
        ("actor", Actor(), "build", []),
        (
            "generator",
            Generator(path="embedded"),
            "next_sequences",
            ["fewer --strategy.settings.generate.slots", "--algo.actor.dtype bfloat16"],
        ),
        ("reward", Reward(functions="length"), "compute_reward", ["a lower --data.batch_size"]),
    ],
)
def test_options_of_the_role_that_are_not_set_yet(
    name: str, role: Role, method: str, said: list[str]
) -> None:
    found = advice(role, method, settings=Settings(), layout=ParallelLayout(d=2), name=name)
    assert found == [*said, "more devices"]


@pytest.mark.parametrize(
    ("config", "layout", "said"),
    [
        (FSDP(), ParallelLayout(d=4), ["more devices"]),
        (FSDP(shard=2), ParallelLayout(d=4), [f"{SHARD} 0 on several devices"]),
        (FSDP(shard=1), ParallelLayout(), [f"{SHARD} 0 on several devices"]),
        (FSDP(shard=4), ParallelLayout(d=4), [f"{SHARD} 0 on more devices"]),
        (FSDP(kept_tokens=9), ParallelLayout(), [f"{KEPT} 0 and {SHARD} 0 on several devices"]),
        (FSDP(kept_tokens=9, shard=1), ParallelLayout(d=4), [f"{KEPT} 0 and {SHARD} 0 on several devices"]),
        (
            Megatron(),
            ParallelLayout(d=4),
            [
                "--strategy.settings.megatron.distributed_optimizer true",
                "--strategy hybrid3d with --strategy.parallel.t above 1",
            ],
        ),
        (
            Megatron(distributed_optimizer=True),
            ParallelLayout(t=2, d=4),
            ["--strategy hybrid3d with --strategy.parallel.t above 2"],
        ),
        (
            ZeRO(),
            ParallelLayout(d=4),
            [
                OFFLOAD,
                "--strategy.settings.zero.stage 3",
                "more devices",
            ],
        ),
        (ZeRO(stage=3, offload_optimizer=True), ParallelLayout(d=4), ["more devices"]),
    ],
)
def test_what_divides_a_model_is_the_engines(
    config: TrainConfig, layout: ParallelLayout, said: list[str]
) -> None:
    assert [*config.savings(layout, changes=True)] == said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ZeRO(), ["--strategy.settings.zero.stage 3", "more devices"]),
        (Megatron(), ["--strategy hybrid3d with --strategy.parallel.t above 1"]),
        (FSDP(shard=2), [f"{SHARD} 0 on several devices"]),
    ],
)
def test_a_model_without_an_optimizer_is_told_of_none(config: TrainConfig, said: list[str]) -> None:
    assert [*config.savings(ParallelLayout(d=4), changes=False)] == said


@pytest.mark.parametrize(
    ("engine", "train", "layout", "said"),
    [
        ("fsdp", FSDP(), ParallelLayout(d=2), ["more devices", *WHOLE]),
        (
            "fsdp",
            FSDP(kept_tokens=9, shard=1),
            ParallelLayout(d=2),
            [f"{KEPT} 0 and {SHARD} 0 on several devices", *WHOLE],
        ),
        ("zero", FSDP(), ParallelLayout(d=2), [OFFLOAD, "more devices", *WHOLE]),
        (
            "megatron",
            FSDP(),
            ParallelLayout(t=8, d=2, generation=Generation(t=2)),
            ["--strategy hybrid3d with --strategy.parallel.generate.t above 2"],
        ),
        (
            "megatron",
            FSDP(),
            ParallelLayout(p=2, t=4, generation=Generation(t=4)),
            ["--strategy hybrid3d with --strategy.parallel.t and --strategy.parallel.generate.t above 4"],
        ),
    ],
)
def test_an_actor_that_generates_is_told_what_divides_it_there(
    engine: Kind, train: FSDP, layout: ParallelLayout, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of the devices that train it leave all of it on each."""
    monkeypatch.setattr("rlhf_lightning.engines.ZeRO.require", lambda _: None)  # DeepSpeed is an extra
    settings = Settings(engine=engine, train=train)
    found = advice(Actor(), "generate_sequences", settings=settings, layout=layout, name="actor")
    assert found == ["fewer --strategy.settings.generate.slots", "--algo.actor.dtype bfloat16", *said]


def test_adapters_are_not_divided_to_generate() -> None:
    actor = Actor(dtype="bfloat16", lora=LoRA(rank=2))
    found = advice(actor, "generate_sequences", settings=Settings(), layout=ParallelLayout(d=2), name="actor")
    assert found == ["fewer --strategy.settings.generate.slots", "more devices", WHOLE[1]]


@pytest.mark.parametrize("engine", ["fsdp", "megatron", "zero"])
def test_a_generator_is_told_of_no_engine(engine: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its devices has all of the model, however the actor is trained."""
    monkeypatch.setattr("rlhf_lightning.engines.ZeRO.require", lambda _: None)  # DeepSpeed is an extra
    settings, generator = Settings(engine=engine, train=FSDP(shard=2)), Generator(dtype="bfloat16")
    for method, said in (
        ("generate_sequences", ["fewer --strategy.settings.generate.slots", "more devices"]),
        ("receive_weights", ["larger GPUs, since each holds all of the actor"]),
        ("build", ["larger GPUs, since each holds all of the actor"]),
    ):
        found = advice(generator, method, settings=settings, layout=ParallelLayout(d=2), name="generator")
        assert found == said


@pytest.mark.parametrize(("decay", "offload"), [(None, []), (0.9, [OFFLOAD])])
def test_a_reference_under_zero_has_masters_if_it_follows_the_actor(
    decay: float | None, offload: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_lightning.engines.ZeRO.require", lambda _: None)  # DeepSpeed is an extra
    role, settings = Reference(path="embedded", dtype="bfloat16", decay=decay), Settings(engine="zero")
    found = advice(role, "build", settings=settings, layout=ParallelLayout(d=2), name="reference")
    assert found == [*offload, "--strategy.settings.zero.stage 3", "more devices"]


def test_a_reference_that_computes_with_the_actors_weights_is_smaller_with_those() -> None:
    """In another type than the actor it would be loaded as a second model."""
    actor = Actor(lora=LoRA(rank=2)).located()
    reference = Reference().following(actor)
    worker = Worker(0, ParallelLayout(), torch.device("cpu"), None, None, settings=Settings(), role="actor")
    actor.build(worker)
    reference.build(replace(worker, role="reference"))
    assert reference.lies_in(actor)
    first, *_ = reference.takes_less("compute_ref_log_prob")
    assert first == "--algo.actor.dtype bfloat16"


def test_tokens_below_those_that_were_given() -> None:
    settings = Settings(engine="megatron", megatron=Megatron(max_tokens_per_micro_batch=4096))
    found = advice(Actor(), "update_actor", settings=settings, layout=ParallelLayout(), name="actor")
    assert "--strategy.settings.megatron.max_tokens_per_micro_batch below 4096" in found


@pytest.mark.parametrize(
    ("name", "role", "method", "said"),
    [
        (
            "critic",
            Critic(path="embedded", dtype="bfloat16"),
            "compute_values",
            ["--algo.critic.gradient_checkpointing true", TOKENS, f"{KEPT} below 9"],
        ),
        (
            "actor",
            Actor(dtype="bfloat16", gradient_checkpointing=True),
            "update_actor",
            [TOKENS, f"{KEPT} below 9"],
        ),
        (
            "reference",
            Reference(path="embedded", dtype="bfloat16"),
            "compute_ref_log_prob",
            [TOKENS, f"{KEPT} below 9"],
        ),
        ("actor", Actor(dtype="bfloat16"), "build", []),
    ],
)
def test_passes_that_are_kept_are_named(name: str, role: Role, method: str, said: list[str]) -> None:
    """A reference finds what actors and critics keep beside it; nothing is kept yet of what is built."""
    settings = Settings(train=FSDP(kept_tokens=9, shard=1))
    found = advice(role, method, settings=settings, layout=ParallelLayout(d=2), name=name)
    assert found == [*said, f"{KEPT} 0 and {SHARD} 0 on several devices"]


class Large(Reference):
    """A reference that does not fit."""

    def build(self, worker: Worker) -> None:
        """Take a place, and find no memory."""
        self.binding.worker = worker
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_model_that_cannot_be_built_is_told_what_makes_it_smaller() -> None:
    device, layout = Device(0), ParallelLayout()
    device.world = World(0, torch.device("cpu"), {(0,): None})
    with pytest.raises(WorkerError) as failed:
        device.host("reference", Placement(Large(path="embedded"), layout, (0,), Settings()))
    first, *_ = str(failed.value).splitlines()
    assert first.endswith(
        "].build: CUDA out of memory. Tried to allocate 2.00 GiB. Try --algo.reference.dtype bfloat16, "
        "or more devices, or --strategy.offload true with a strategy whose models share devices, such as "
        "colocated."
    )
