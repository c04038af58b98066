"""Each model is predicted as it computes itself: in its type, with its recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_lightning.algos import PPO
from rlhf_lightning.mapping import hardware, memory, shapes
from rlhf_lightning.mapping.dataflow import Dataflow, Stage, Work
from rlhf_lightning.mapping.plan import plan
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.mapping_inputs import read_recipes
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.strategies import Auto
from rlhf_lightning.workers import Actor, Critic, Settings
from tests.unit.mapping.test_search_auto import attached
from tests.unit.mapping.test_search_plan import flow_of

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
    found = read_recipes(changed, Settings(), costs.workload)["critic"]
    assert (found.element, found.masters, found.recompute) == (4, False, True)
    assert found.prompt == costs.workload.prompt


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
