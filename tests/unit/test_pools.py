"""Functions have no devices of their own, and a reference that nothing reads none; a reward with a model has.

Functions have some where parts of a batch are scored as they come. A run needs those that it calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, cast

import pytest
import ray
from lightning.pytorch.trainer.states import TrainerFn

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import DAPO, GRPO, PPO
from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.strategies import NeMoAligner, OneStepOff, OpenRLHF, Pipelined, Split, Standalone
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.strategy_checks import check_layouts
from rlhf_lightning.workers import Reference, Reward
from tests.unit.algos.short import trainer

Pools = list[tuple[int, tuple[str, ...]]]
"""Of each the devices and the roles."""
LEARNER = ("actor", "reward")
"""The actor, and the functions beside it."""


def judged() -> GRPO:
    """With a reward that adds up a model's score and a function's."""
    return GRPO(reward=Reward(path="any", functions="length"))


def placed(strategy: Strategy, algorithm: RLHFAlgorithm, devices: int | None) -> Pools:
    strategy.connect(algorithm)
    return [(pool.num_devices, pool.roles) for pool in strategy.place(tuple(strategy.models()), devices)]


@pytest.mark.parametrize(
    ("strategy", "algorithm", "devices", "pools"),
    [
        (Standalone(), GRPO, 8, [(4, LEARNER), (4, ("reference",))]),
        (Standalone(), PPO, None, [(1, LEARNER), (1, ("critic",)), (1, ("reference",))]),
        (Standalone(), judged, 6, [(2, ("actor",)), (2, ("reference",)), (2, ("reward",))]),
        (OpenRLHF(), PPO, 8, [(2, LEARNER), (2, ("critic",)), (2, ("reference",)), (2, ("generator",))]),
        (OneStepOff(generator_devices=4), GRPO, 8, [(2, LEARNER), (2, ("reference",)), (4, ("generator",))]),
        (OpenRLHF(generator_devices=2), GRPO, None, [(1, LEARNER), (1, ("reference",)), (2, ("generator",))]),
        (Pipelined(), GRPO, 4, [(1, ("actor",)), (1, ("reference",)), (1, ("reward",)), (1, ("generator",))]),
        (Pipelined(), DAPO, 3, [(1, ("actor",)), (1, ("reward",)), (1, ("generator",))]),
        (Split(), GRPO, 3, [(3, ("actor", "reference", "reward"))]),
        (Split(), judged, 4, [(2, ("actor", "reference")), (2, ("reward",))]),
        (Split(), PPO, 4, [(2, ("actor", "reference")), (2, ("critic", "reward"))]),
        (Standalone(), DAPO, 2, [(2, LEARNER)]),
        (OneStepOff(), DAPO, 8, [(4, LEARNER), (4, ("generator",))]),
        (Split(), DAPO, 2, [(2, LEARNER)]),
        (NeMoAligner(), GRPO, 3, [(3, ("actor", "reference", "reward"))]),
        (NeMoAligner(), judged, 2, [(1, ("actor", "reference")), (1, ("reward",))]),
    ],
    ids=lambda value: value.strategy_name if isinstance(value, Strategy) else None,
)
def test_devices_are_divided_over_what_computes_there(
    strategy: Strategy, algorithm: Callable[[], RLHFAlgorithm], devices: int | None, pools: Pools
) -> None:
    assert placed(strategy, algorithm(), devices) == pools


class Watched(DAPO):
    """Whose validation asks the reference, too."""

    validates = ("reference",)


@pytest.mark.parametrize("make", [Watched, lambda: DAPO(reference=Reference(decay=0.9))])
def test_a_reference_that_validates_or_follows_has_devices_though_no_step_calls_it(
    make: Callable[[], RLHFAlgorithm],
) -> None:
    assert make().uncalled() == ("reference",)
    assert placed(Standalone(), make(), 2) == [(1, LEARNER), (1, ("reference",))]


def test_the_actors_side_is_not_chosen_where_the_other_has_functions_alone() -> None:
    said = (
        "Split(actor_devices=2): nothing reads it, since the algorithm has models of one side alone (actor, "
        "reference), on all devices. Leave it out."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        placed(Split(actor_devices=2), GRPO(), 4)


@pytest.mark.parametrize("devices", range(3, 13))
def test_what_is_advised_where_models_and_generator_cannot_be_equal_can_be_placed(devices: int) -> None:
    try:
        placed(OpenRLHF(), GRPO(), devices)
    except ValueError as err:
        advice = re.search(r"Try devices=(\d+), or generator_devices=(\d+)\.$", str(err))
        assert advice is not None
        placed(OpenRLHF(), GRPO(), int(advice[1]))
        placed(OpenRLHF(generator_devices=int(advice[2])), GRPO(), devices)


class Given(Strategy):
    """Returns what it is given."""

    found: ClassVar[object] = None

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        return cast(list[ResourcePool], self.found)


ALL = ("actor", "reference", "reward")


def one_of(devices: object) -> list[ResourcePool]:
    """All roles on so many devices."""
    return [ResourcePool("all", cast(int, devices), ALL)]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "Given.place: returned None where a ResourcePool is wanted. Write return [ResourcePo"),
        ([{"roles": ALL}], "Given.place: returned {'roles': ('actor', 'reference', 'reward')} where"),
        (one_of(1.5), "Given.place: the pool of actor, reference, reward has num_devices=1.5. Give it"),
        (one_of(0), "reward has num_devices=0. Give it a whole number, at least 1"),
        (one_of("1"), "reward has num_devices='1'. Give it a whole"),
    ],
    ids=["nothing", "a dict", "a fraction", "none", "a text"],
)
def test_what_place_returns_is_checked(found: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Given, "found", found)
    strategy = Given()
    strategy.connect(GRPO())
    with pytest.raises(ValueError, match=re.escape(said)):
        strategy._pools(strategy.models())


def test_pools_may_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Given, "found", (ResourcePool(name, 1, (name,)) for name in ALL))
    strategy = Given(devices=3)
    strategy.connect(GRPO())
    assert [pool.roles for pool in strategy._pools(strategy.models())] == [(name,) for name in ALL]


def test_devices_on_which_no_model_is_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Given, "found", one_of(2))
    for devices in (None, 2, 4):
        strategy = Given(devices=devices)
        strategy.connect(GRPO())
        roles = strategy.models()
        check_layouts(strategy, roles, strategy._pools(roles))
    assert [record.message for record in caplog.records] == [
        "strategy.devices=4: Given.place puts the models on 2."
    ]


def test_a_ray_with_too_few_devices_is_told_before_data_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0})
    placed = list[Sequence[str]]()

    class Counted(Standalone):
        def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
            placed.append(roles)
            return super().place(roles, devices)

    algorithm, strategy = PPO(), Counted()
    algorithm._trainer = run = trainer(strategy, tmp_path)
    strategy.connect(algorithm)
    run.state.fn = TrainerFn.VALIDATING
    strategy.setup_environment()
    assert len(placed) == 1  # a search traces a step each time
    run.state.fn = TrainerFn.FITTING
    with pytest.raises(ValueError, match=r"^the pools need 3 devices, and there is 1 CPU\. Try --strategy"):
        strategy.setup_environment()
