"""Placements and layouts that cannot be, refused before data is read or a process starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
import ray
import torch

from rlhf_lightning import strategy_checks
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import DPO, GRPO, PPO, SFT, RewardModel
from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP, Megatron
from rlhf_lightning.functional import PolicyLoss
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.strategies import (
    Colocated,
    HybridEngine3D,
    NeMoAligner,
    OneStepOff,
    OpenRLHF,
    Pipelined,
    Split,
    Standalone,
)
from rlhf_lightning.strategies.hybrid3d import Parallel3D, Sizes
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Reference, Role, Settings
from tests.unit.algos.short import trainer
from tests.unit.rlhf import refuse_to_start


def prepare(strategy: Strategy, algorithm: RLHFAlgorithm | None = None) -> None:
    """What the trainer asks of a strategy before it reads data."""
    strategy.connect(algorithm or PPO())
    strategy.setup_environment()


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", refuse_to_start)


SHARING = ", or --strategy colocated, where all models share every device"


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Split(devices=1), f"Split(devices=1): 1 device has no two halves. Try devices=2{SHARING}."),
        (Split(devices=1, actor_devices=1), f"1 device has no two halves. Try devices=2{SHARING}."),
        (Split(actor_devices=-1), "leaves 3 for ('critic', 'reward'). Try actor_devices between 1 and 1."),
        (NeMoAligner(devices=1), f"of 2 devices, the same number on each side. Try devices=2{SHARING}."),
        (Standalone(devices=2), f"over 3 models (actor, critic, reference). Try devices=3{SHARING}."),
        (Standalone(devices=1), "Standalone(devices=1): 1 device cannot be divided over 3 models (actor,"),
        (Split(devices=3), "Split(devices=3): 3 devices are not two equal halves. Try devices=2"),
        (NeMoAligner(devices=3), "a multiple of 2 devices, the same number on each side. Try devices=2"),
        (
            OpenRLHF(devices=9, generator_devices=2),
            "OpenRLHF(devices=9, generator_devices=2): 7 are left for 3 models, which have equally many "
            "each. Try generator_devices=3, or devices=8 with generator_devices=2",
        ),
        (OpenRLHF(devices=8, generator_devices=0), "devices=2, or devices=7 with generator_devices=1"),
        (
            OpenRLHF(devices=3, generator_devices=3),
            "3 models, which have equally many each. Try devices=6 with",
        ),
        (
            OpenRLHF(devices=3, generator_devices=1),
            f"2 are left for 3 models, which have equally many each. Try devices=4 with "
            f"generator_devices=1{SHARING}.",
        ),
        (OneStepOff(devices=2, generator_devices=4), "generator_devices=4): 0 are left for 3 models"),
        (
            OpenRLHF(devices=3),
            "OpenRLHF(devices=3): 3 devices cannot be divided over 4 models (actor, critic, reference, "
            f"generator). Try devices=4{SHARING}.",
        ),
        (
            Pipelined(devices=8),
            "Pipelined(devices=8): 8 devices cannot be divided over 5 models (actor, critic, reference, "
            "reward, generator). Try devices=5, or generator_devices=4.",
        ),
        (
            Pipelined(devices=2),
            "5 models (actor, critic, reference, reward, generator) would share 2 devices, and on one device "
            "they take turns. Try devices=5, or --strategy colocated",
        ),
        (OneStepOff(devices=3), "OneStepOff(devices=3): 3 devices cannot be divided over 4 models"),
        (
            Standalone(devices=4),
            "4 devices cannot be divided over 3 models (actor, critic, reference). Try devices=3.",
        ),
    ],
)
def test_devices_that_cannot_be_divided(strategy: Strategy, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        prepare(strategy)


class Own(Strategy):
    """The placement that it is given."""

    pools: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """Whatever they are."""
        del devices
        return [ResourcePool(str(number), 1, names) for number, names in enumerate(self.pools)]


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        (
            (("actor", "critic", "reference"), ("rewards",)),
            "Own.place: the algorithm has no rewards that a step would call. It has actor, critic, "
            "reference, reward. Leave rewards out.",
        ),
        (
            (("actor", "critic"),),
            "Own.place, pools of actor, critic: lacks reference, reward. Add each to one pool.",
        ),
        ((), "Own.place, pools of nothing: lacks actor, critic, reference, reward. Add each to one pool."),
        (
            (("actor", "critic", "reference", "reward"), ("reward",)),
            "Own.place: reward stand in two pools. Keep one.",
        ),
        ((("actor", "critic", "reference"), "reward"), "ResourcePool.roles='reward': is one text, "),
    ],
    ids=["unknown", "missing", "nothing", "twice", "text"],
)
def test_a_placement_of_ones_own_has_each_role_once(
    pools: tuple[tuple[str, ...], ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Own, "pools", pools)
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        prepare(Own())


@dataclass(frozen=True, kw_only=True)
class Bare(PolicyLoss):
    """Names its columns by a method."""

    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """What a property should say."""
        return ("advantages",)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (GRPO(reward_kl_coef=-1.0), "reward_kl_coef=-1.0: what leaves the reference would be rewarded. Give"),
        (GRPO(policy_loss=Bare()), "Bare.columns is a method. Put @property above it"),
    ],
)
@pytest.mark.parametrize("strategy", [Colocated(), Standalone(), Split(), Pipelined()])
def test_options_are_checked_before_they_say_what_is_placed(
    strategy: Strategy, algorithm: RLHFAlgorithm, said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        prepare(strategy, algorithm)


def test_a_placement_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "pools", (("actor", "reward"), ("reference", "critic")))
    prepare(Own())


@pytest.mark.parametrize(("devices", "generator"), product((2, 5, 8, 9, 23), (-1, 0, 1, 2, 7, 22, 23)))
def test_what_is_advised_for_a_generator_can_be_placed(devices: int, generator: int) -> None:
    roles = ("actor", "critic", "reference", "reward", "generator")
    try:
        OpenRLHF(devices=devices, generator_devices=generator).place(roles, devices)
    except ValueError as err:
        advice = re.findall(
            r"generator_devices=(\d+), or|devices=(\d+) with generator_devices=(\d+)", str(err)
        )
        assert 1 <= len(advice) <= 2
        for kept, total, wanted in advice:
            number = int(total or devices)
            OpenRLHF(generator_devices=int(wanted or kept)).place(roles, number)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (
            Split(actor_devices=1),
            "Split(actor_devices=1): nothing reads it, since the algorithm has models of one side alone "
            "(reward), on all devices. Leave it out.",
        ),
        (
            OpenRLHF(devices=4, generator_devices=3),
            "OpenRLHF(generator_devices=3): nothing reads it, since the algorithm has no actor",
        ),
        (Pipelined(generator_devices=1), "no actor that would generate, only reward. Leave it out."),
        (Pipelined(parts=4), "Pipelined(parts=4): nothing reads it, since the algorithm has no actor"),
        (OneStepOff(max_staleness=2), "(max_staleness=2): nothing reads it, since the algorithm has no"),
    ],
)
def test_options_of_what_the_algorithm_does_not_have(strategy: Strategy, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        prepare(strategy, RewardModel())


@pytest.mark.parametrize("strategy", [OpenRLHF, OneStepOff, Pipelined])
def test_who_reads_answers_has_no_generator(strategy: type[OpenRLHF]) -> None:
    for algorithm, roles in ((SFT(), ["actor"]), (DPO(), ["actor", "reference"])):
        reads = strategy(devices=len(roles))
        prepare(reads, algorithm)
        placements, groups = reads.placements(reads.models(), reads._pools(reads.models()))
        assert ([*placements], groups) == (roles, [])
    said = r"\(generator_devices=1\): nothing reads it, since .* from given answers, and has no generator\."
    with pytest.raises(ValueError, match=said):
        prepare(strategy(generator_devices=1), SFT())


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (OneStepOff(max_staleness=3), "OneStepOff(max_staleness=3): nothing reads it, since the algorithm "),
        (Pipelined(parts=2), "(parts=2): nothing reads it, since the algorithm learns from given answers"),
        (Pipelined(parts=16), "Pipelined(parts=16): nothing reads it, "),
    ],
)
def test_options_of_generation_are_refused_where_answers_are_given(strategy: OpenRLHF, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        prepare(strategy, DPO())
    prepare(strategy, PPO())


@pytest.mark.parametrize("called", ["fit", "validate", "predict"])
def test_who_reads_answers_predicts_on_the_devices_on_which_it_learns(
    called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: Strategy, roles: dict[str, Role]) -> None:
        raise KeyError(", ".join(roles))

    monkeypatch.setattr(OpenRLHF, "_launch", start)
    run = trainer(OpenRLHF(devices=1), tmp_path, limit_val_batches=None)
    data = TaskData(batch_size=2, num_rows=4, completions=True)
    with pytest.raises(KeyError, match=r"^'actor'$"):
        getattr(run, called)(SFT(), datamodule=data)


@pytest.mark.parametrize("strategy", [Split(), NeMoAligner(), OpenRLHF(), OneStepOff(), HybridEngine3D()])
def test_an_algorithm_of_one_model(strategy: Strategy) -> None:
    prepare(strategy, RewardModel())


class Adversarial(PPO):
    """With a model that has the name of the generator."""

    generator: Reference = field(default_factory=Reference)


@pytest.mark.parametrize("strategy", [OpenRLHF(), OneStepOff(), Pipelined()])
def test_no_role_takes_the_place_of_one_of_the_algorithms(strategy: Strategy) -> None:
    said = rf"^Adversarial\.generator: {type(strategy).__name__} adds a role called generator, .* standalone"
    with pytest.raises(ValueError, match=said):
        prepare(strategy, Adversarial())
    prepare(Standalone(), Adversarial())


def test_a_batch_in_one_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^strategy\.parts=1: .* Try 8, or --strategy openrlhf\.$"):
        Pipelined(parts=1)


def test_nemo_aligner_generates_as_it_trains() -> None:
    strategy = NeMoAligner(parallel=Sizes(p=2, t=4))
    assert strategy.parallel == Parallel3D(p=2, t=4, generate=Generation(2, 4))


def test_ranks_stand_in_the_order_that_is_asked_for() -> None:
    parallel = Parallel3D(p=2, t=2, order="tdp", generate=Generation(1, 2))
    layout = HybridEngine3D(parallel=parallel).layout(Actor(path="any"), "actor", 8)
    assert layout == ParallelLayout(2, 2, 2, order="tdp", generation=Generation(1, 2))


def test_one_side_alone_takes_any_number_of_devices() -> None:
    strategy = NeMoAligner()
    strategy.connect(RewardModel())
    (pool,) = strategy.place(("reward",), 3)
    assert (pool.num_devices, pool.roles) == (3, ("reward",))
    assert strategy.place(("reward",), None)[0].num_devices == 1


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (
            HybridEngine3D(devices=3, parallel=Parallel3D(t=2)),
            "actor has p=1 x t=2 = 2 ranks a replica, which does not divide 3",
        ),
        (
            HybridEngine3D(devices=16, parallel=Parallel3D(roles={"critic": Sizes(t=16)})),
            "critic.path=embedded: layout (train t=16): t does not divide the 4 attention heads. "
            "Try train t=4",
        ),
        (
            HybridEngine3D(parallel=Parallel3D(p=9)),
            "actor.path=embedded: p=9 stages of 1 chunks for 6 layers: a chunk would be empty. Try p=6",
        ),
        (
            HybridEngine3D(
                parallel=Parallel3D(p=3, generate=Generation(p=3)),
                settings=Settings(megatron=Megatron(chunks=3)),
            ),
            "p=3 stages of 3 chunks for 6 layers: a chunk would be empty. Try p=2",
        ),
        (
            HybridEngine3D(parallel=Parallel3D(t=4, generate=Generation(t=3))),
            "generate t=3): generate t must divide train t. Try generate t=1 or 2 or 4",
        ),
        (
            HybridEngine3D(parallel=Parallel3D(roles={"judge": Sizes(t=2)})),
            "HybridEngine3D(parallel.roles=['judge']): the algorithm has no such role that a step would "
            "call. It has actor, critic, reference, reward. Leave judge out.",
        ),
        (
            HybridEngine3D(parallel=Parallel3D(roles={"reward": Sizes(t=2)})),
            "HybridEngine3D(parallel.roles=['reward']): these have functions only, and no model to divide",
        ),
    ],
)
def test_impossible_layouts(strategy: Strategy, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        prepare(strategy)


KEEPING = Settings(train=FSDP(kept_tokens=64, shard=1))


def test_passes_are_not_kept_where_others_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU no bytes move, but each call of another role frees what a model has kept."""
    monkeypatch.setattr(strategy_checks, "num_gpus", lambda: 0)
    said = r"train\.kept_tokens=64 with strategy\.offload=true: .* of another role on the devices of actor"
    for strategy in (Colocated(offload=True, settings=KEEPING), Split(offload=True, settings=KEEPING)):
        with pytest.raises(ValueError, match=rf"{said} .* Leave strategy\.offload out"):
            prepare(strategy)
    prepare(Colocated(settings=KEEPING))
    prepare(Colocated(offload=True))
    alone = Colocated(offload=True, settings=KEEPING)
    alone.connect(SFT())
    alone.setup_environment()
    monkeypatch.setattr(strategy_checks, "num_gpus", lambda: 1)
    prepare(Colocated(offload=True, settings=KEEPING))


@pytest.mark.parametrize(("gpus", "variable", "language"), [(1, "CC", "C"), (0, "CXX", "C\\+\\+")])
def test_the_compiler_is_one_for_the_devices_whatever_the_controller_has(
    gpus: int, variable: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not gpus)
    monkeypatch.setattr(strategy_checks, "num_gpus", lambda: gpus)
    monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(ValueError, match=rf"compile_layers=true: found no {language} compiler \(no-such-co"):
        prepare(Colocated(settings=Settings(train=FSDP(compile_layers=True))))


class Apart(Colocated):
    """The options of the training engine are the critic's alone; the other models have the defaults."""

    def settings_of(self, name: str) -> Settings:
        settings = super().settings_of(name)
        return settings if name == "critic" else replace(settings, train=FSDP())


def test_a_model_is_placed_and_checked_by_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = Apart(devices=2, settings=Settings(train=FSDP(tensor=2)))
    prepare(strategy)
    placements, _ = strategy.placements(strategy.models(), strategy._pools(strategy.models()))
    assert [name for name, placement in placements.items() if placement.layout.t == 2] == ["critic"]
    monkeypatch.setattr(strategy_checks, "num_gpus", lambda: 0)
    with pytest.raises(ValueError, match=r"kept_tokens=64 with .* on the devices of critic frees"):
        prepare(Apart(offload=True, settings=KEEPING))


@pytest.mark.parametrize(
    "sizes", [Parallel3D(t=2, generate=Generation(rule="vanilla")), Parallel3D(p=2, generate=Generation(p=2))]
)
def test_possible_layouts(sizes: Parallel3D) -> None:
    prepare(HybridEngine3D(parallel=sizes))


def test_a_size_below_1() -> None:
    with pytest.raises(ValueError, match=r"^Parallel3D\(p=0, t=1\): every size is at least 1"):
        Parallel3D(p=0)
