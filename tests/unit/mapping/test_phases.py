"""Seconds of what a run did: a method's as the simulators say, an iteration's as its pools wait."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from rlhf_lightning.mapping import simulate
from rlhf_lightning.mapping.dataflow import Kind
from rlhf_lightning.mapping.estimate import Estimate
from rlhf_lightning.mapping.hardware import CPU
from rlhf_lightning.mapping.phases import Iteration, Phase
from rlhf_lightning.mapping.shapes import KNOWN
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel import Generation, ParallelLayout

SHAPE = KNOWN["llama-7b"]
LAYOUT = ParallelLayout(p=1, t=4, d=2, generation=Generation(t=2))
ONE_CALL = Workload(
    prompt=64, real_prompt=32, response=64, lengths=(32, 64), batch=16, mini_batches=1, packed=True
)
CALL_S = CPU.overhead.call


def phase(
    role: str, kind: Kind, *, calls: int = 1, seconds: float = 1.0, devices: tuple[int, ...] = (0, 1)
) -> Phase:
    return Phase(
        role=role, method=kind, kind=kind, calls=calls, seconds=seconds, devices=devices, shape=SHAPE,
        layout=LAYOUT, workload=ONE_CALL,
    )  # fmt: skip


def iteration(*phases: Phase, seconds: float = 10.0, calls: int = 4) -> Iteration:
    return Iteration(step=1, seconds=seconds, calls=calls, phases=phases)


def test_methods_take_what_the_simulators_say() -> None:
    at = (CPU, SHAPE, LAYOUT)
    updates = replace(ONE_CALL, batch=4 * 16, mini_batches=4)
    whole = simulate.train(*at, updates).seconds - CALL_S
    assert phase("actor", "train", calls=4).predict(CPU) == pytest.approx(whole)
    scoring = simulate.infer(*at, ONE_CALL).seconds - CALL_S
    assert phase("critic", "infer", calls=3).predict(CPU) == pytest.approx(3 * scoring)
    answering = simulate.generate(*at, ONE_CALL, kv_bytes=1e12).seconds - CALL_S
    moving = simulate.transition(*at, ONE_CALL).seconds
    answers = phase("actor", "generate", calls=2)
    assert answers.predict(CPU) == pytest.approx(2 * (answering + moving))
    again = replace(answers, rescored=True).predict(CPU)
    assert again == pytest.approx(2 * (answering + moving + scoring))


def test_pools_work_side_by_side_within_a_stage() -> None:
    """Scoring is summed in a pool, the longest pool counts; training waits for all of it."""
    scored, other = phase("critic", "infer"), phase("reference", "infer", devices=(2,))
    trained = phase("critic", "train")
    score, train = scored.predict(CPU), trained.predict(CPU)
    together = iteration(scored, scored, trained).predict(CPU)
    assert together == pytest.approx(2 * score + train + 4 * CALL_S)
    assert iteration(scored, other, trained).predict(CPU) == pytest.approx(score + train + 4 * CALL_S)
    elsewhere = replace(trained, devices=(2,))
    assert iteration(scored, elsewhere).predict(CPU) == pytest.approx(score + train + 4 * CALL_S)


def test_seconds_that_no_model_accounts_for() -> None:
    one = phase("critic", "infer", seconds=3.0)
    beside = phase("reference", "infer", seconds=2.0, devices=(2,))
    assert iteration(one, beside, seconds=4.0, calls=4).call_overhead == pytest.approx(0.25)
    assert iteration(one, replace(beside, devices=(0, 1)), seconds=4.0).call_overhead == 0.0


def test_through_a_file() -> None:
    one = iteration(phase("actor", "generate"), replace(phase("critic", "train"), layout=ParallelLayout()))
    assert Iteration.of(json.loads(json.dumps(asdict(one)))) == one


@pytest.mark.parametrize(("reshards", "defers"), [(True, True), (False, True), (False, False)])
def test_layers_that_stay_are_gathered_once_and_deferred_gradients_reduced_once(
    *, reshards: bool, defers: bool
) -> None:
    """32 micro-batches of a row: each gathers twice, and reduces, unless it is said otherwise."""
    usual = replace(ONE_CALL, sharding="full", batch=64, micro_batch_tokens=128)
    other = replace(usual, reshards=reshards, defers=defers)

    def ratio(run: Callable[..., Estimate]) -> float:
        many, few = (run(CPU, SHAPE, ParallelLayout(d=2), w).parts for w in (usual, other))
        return few["intra-node network"] / many["intra-node network"]

    rows = 64 // 2
    gathered, reduced = rows * (4 if reshards else 2), 4 * (1 if defers else rows)
    assert ratio(simulate.train) == pytest.approx((gathered + reduced) / (rows * 8), rel=0.01)
    assert ratio(simulate.infer) == pytest.approx(1 if reshards else 1 / rows, rel=0.01)
