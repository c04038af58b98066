"""Which layouts the search looks at: those that engines take, with replicas that have rows or make room."""

from __future__ import annotations

from dataclasses import replace

from rlhf_lightning.mapping import hardware
from rlhf_lightning.mapping.dataflow import Dataflow, Stage, Work
from rlhf_lightning.mapping.plan import plan, smallest_cluster
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import ParallelLayout
from tests.unit.mapping.simulated import ROLES, SEVEN, costs_of, flow_of

DIVIDED = Workload(sharding="full", packed=True)
"""FSDP's: replicas divide all weights among them."""


def test_layouts_are_those_that_engines_take() -> None:
    wide = replace(SEVEN, heads=48, kv_heads=48, hidden=4800)
    tensor = {at.t for at in costs_of(wide).layouts("actor", 6)}
    assert tensor == {1, 2}  # three ranks share 48 heads, but not 11,008 columns
    even = costs_of(replace(wide, intermediate=12288))
    assert {at.t for at in even.layouts("actor", 6)} == {1, 2, 3, 6}
    grouped = costs_of(replace(wide, intermediate=12288, hidden=4608, kv_heads=2)).layouts("actor", 6)
    assert {at.generation.t for at in grouped if at.generation and at.t == 6} == {1, 2, 6}
    for one_stage, stages in ((False, {1, 2, 4}), (True, {1})):
        found = costs_of(one_stage=one_stage).layouts("actor", 4)
        assert {at.generation.p for at in found if at.generation} == stages


def small(*, updates: int, workload: Workload) -> SimulatedCosts:
    """PPO of 64 rows on nodes of eight devices, of models whose 24 layers make at most eight stages."""
    models = dict.fromkeys(ROLES, replace(SEVEN, layers=24))
    return SimulatedCosts(hardware.A100, flow_of(64, updates=updates), models, workload=workload)


def test_replicas_have_rows_of_the_largest_piece_of_work() -> None:
    """Updates of four rows: the actor answers 64 on as many devices, and most have none in updates."""
    costs = small(updates=16, workload=Workload())
    every = {(p, t, 16 // (p * t)) for p in (1, 2, 4, 8) for t in (1, 2, 4, 8) if p * t <= 16}
    assert {(at.p, at.t, at.d) for at in costs.layouts("actor", 16)} == every
    wide = {role: max(at.d for at in costs.layouts(role, 128)) for role in ROLES}
    assert wide == dict.fromkeys(ROLES, 64)


def trained_alone(rows: int) -> Dataflow:
    """An actor that learns from given answers, as with SFT."""
    return Dataflow((Stage("training", (Work("actor", "train", rows, 1),)),))


def replicas_of(workload: Workload) -> SimulatedCosts:
    """A trained model of 16 bytes for each of 6.7 B parameters, 108 GB, on devices of 40 GB; two rows."""
    return SimulatedCosts(
        replace(hardware.A100, memory_bytes=40e9),
        trained_alone(2),
        {"actor": SEVEN},
        workload=workload,
        allows=lambda layout, _layers: layout.p * layout.t == 1,
    )


def test_replicas_that_divide_the_weights_may_be_more_than_rows() -> None:
    """Four devices hold the model, of which two have a row; where each holds all of it, more make no room."""
    costs = replicas_of(DIVIDED)
    assert [at.d for n in (1, 2, 4, 8) for at in costs.layouts("actor", n)] == [1, 2, 4, 8]
    assert smallest_cluster(costs) == 4
    assert [pool.roles for pool in plan(costs, 8).mappings[0].pools] == [("actor",)]
    whole = replicas_of(replace(DIVIDED, sharding="none"))
    assert [at.d for n in (1, 2, 4, 8) for at in whole.layouts("actor", n)] == [1, 2]


def test_a_method_that_runs_no_model_costs_nothing_and_divides_nothing() -> None:
    """A call of an actor's own method without rows: it was a scoring pass of one row, of one replica."""
    flow = flow_of(64)
    generation, preparation, training = flow.stages
    own = (Work("actor", "function", 0, 1), Work("actor", "function", 64, 1))
    called = Dataflow((generation, replace(preparation, work=(*preparation.work, *own)), training))
    models = dict.fromkeys(ROLES, SEVEN)
    plain, more = (SimulatedCosts(hardware.A100, f, models, workload=DIVIDED) for f in (flow, called))
    assert list(more.layouts("actor", 8)) == list(plain.layouts("actor", 8))
    at = ParallelLayout(d=8)
    assert more.seconds("actor", at, 60e9) == plain.seconds("actor", at, 60e9)
    assert more.work("actor")[1] == ()
