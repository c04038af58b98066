"""What an engine on DeepSpeed keeps on the host, does without, and leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines import PARTS
from rlhf_lightning.engines.choice import train_engine
from rlhf_lightning.engines.deepspeed.engine import ZeROEngine
from rlhf_lightning.engines.deepspeed.scope import ZeroParamStatus
from rlhf_lightning.mapping import memory, shapes
from rlhf_lightning.mapping.observe import recipe
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.workers import Actor, Reference, Settings
from tests.extras import zero
from tests.unit import spmd
from tests.unit.engines import tiny


def with_parameters_away(group: dist.ProcessGroup, spec: ModelSpec) -> tuple[Tensor, bool]:
    """What a model says whose parameters are on the host between layers; whether its masters are there."""
    config = zero.settings(3, offload_parameters=True)
    engine = train_engine(spec, head="lm", seat=zero.seat(group), config=config)
    assert isinstance(engine, ZeROEngine)
    said = engine.infer(zero.own(group), temperature=0.7)["log_probs"]
    return said, engine._module.optimizer.offload_optimizer


def test_masters_of_a_model_that_nothing_trains_go_to_the_host_with_it(paths: dict[str, Path]) -> None:
    spec = Reference(path=str(paths["tied"]))
    whole = zero.fsdp(spec).infer(tiny.rows(), temperature=0.7)["log_probs"]
    for rank, (said, away) in enumerate(spmd.run(2, with_parameters_away, spec)):
        assert away
        torch.testing.assert_close(said, whole[rank::2], rtol=0, atol=1e-5)


def followed(group: dist.ProcessGroup, spec: ModelSpec, *, offload: bool) -> list[dict[str, int]]:
    """By stage, what a model holds that becomes an average of others."""
    found, seat = [], zero.seat(group)
    for stage in (1, 2, 3):
        config = zero.settings(stage, offload_optimizer=offload)
        engine = train_engine(spec, head="lm", seat=seat, config=config)
        before = engine.give_weights()
        engine.follow_weights(torch.zeros_like(before), decay=0.5)
        torch.testing.assert_close(engine.give_weights(), before / 2)
        assert torch.isfinite(engine.infer(zero.own(group), temperature=1.0)["log_probs"]).all()
        with pytest.raises(RuntimeError, match=r"trains=False, so there is no memory for gradients\."):
            engine.accumulate(zero.own(group), tiny.Fit(), tiny.counts(), temperature=1.0)
        found.append(engine.memory())
    return found


@pytest.mark.parametrize("offload", [False, True])
def test_a_model_that_follows_another_has_no_gradients(paths: dict[str, Path], *, offload: bool) -> None:
    spec = Reference(path=str(paths["tied"]), dtype="bfloat16", decay=0.5)
    size = 4 * len(zero.fsdp(spec).give_weights())
    for stages in spmd.run(2, followed, spec, offload=offload):
        for held in stages:
            assert held["optimizer"] == pytest.approx(size / 2, rel=0.02)
            assert held["gradients"] == 0


def rested(group: dist.ProcessGroup, spec: ModelSpec, stage: int, *, offload: bool) -> list[Tensor]:
    """Weights of an engine that only trains, and of one whose parts rest between micro-batches."""
    found, portions = [], zero.own(group).split(2)
    for rests in (False, True):
        engine = zero.zero(group, spec, stage, offload_optimizer=offload)
        engine._offloaded.frees = True
        for _ in range(2):
            for number, rows in enumerate(portions):
                if rests:
                    away(engine, pending=number > 0)
                zero.step_into(engine, rows)
            engine.optimizer_step()
        found.append(engine.give_weights())
    return found


def away(engine: ZeROEngine, *, pending: bool) -> None:
    """Offload and reload everything; gradients that a step has used need no room on the host."""
    before = engine.memory()
    masters = sum(flat.nbytes for flat in engine._masters._flats)
    copies = 2 if engine._config.offload_optimizer else 1  # added up, and as the step reads them
    assert before["gradients"] >= copies * masters or not (pending or engine._config.stage == 3)
    engine.offload(PARTS)
    assert engine.memory()["host"] == sum(before.values()) - (0 if pending else before["gradients"])
    assert engine.reload_bytes() == sum(before.values())
    engine.reload(PARTS)
    assert engine.memory() == before


@pytest.mark.parametrize(
    ("stage", "offload", "dtype"),
    [
        (1, False, "float32"),
        (1, False, "bfloat16"),
        (2, False, "bfloat16"),
        (2, True, "float32"),
        (3, False, "float32"),
        (3, True, "float32"),
    ],
)
def test_rest_changes_no_training(
    paths: dict[str, Path], stage: int, dtype: tiny.Dtype, *, offload: bool
) -> None:
    spec = tiny.spec(paths["tied"], dtype=dtype)
    for plain, rests in spmd.run(2, rested, spec, stage, offload=offload):
        assert torch.equal(rests, plain)


def gone(group: dist.ProcessGroup, spec: ModelSpec) -> list[bool]:
    """By stage, whether nothing refers to a model once its engine is no more."""
    found = []
    for stage in (1, 2, 3):
        engine = zero.zero(group, spec, stage)
        zero.step(engine, zero.own(group))
        model = weakref.ref(engine._model)
        del engine
        for _ in range(2):  # the engine, whose end frees what DeepSpeed holds; then that
            gc.collect()
        found.append(model() is None)
    return found


def test_a_model_ends_with_its_engine(paths: dict[str, Path]) -> None:
    assert spmd.run(1, gone, tiny.spec(paths["tied"])) == [[True, True, True]]


def whole(group: dist.ProcessGroup, spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """By call of an iteration, once all were called: parameters that are whole after it, and all-gathers."""
    engine, rows, gathers = zero.zero(group, spec, 3, whole_below=200), zero.own(group), list[int]()
    backend = engine._scope._backend
    gather = backend.all_gather_function

    def counted(*given: object, **named: object) -> object:
        gathers[-1] += 1
        return gather(*given, **named)

    backend.all_gather_function = counted
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: dict(engine.weights()),
        "infer": lambda: engine.infer(rows, temperature=0.7),
        "first": lambda: zero.step_into(engine, rows),
        "second": lambda: zero.step_into(engine, rows),
        "step": engine.optimizer_step,
    }
    found = {}
    for name, call in [*calls.items()] * 2:
        gathers.append(0)
        call()
        statuses = [vars(parameter)["ds_status"] for parameter in engine._parameters.values()]
        found[name] = statuses.count(ZeroParamStatus.AVAILABLE), gathers[-1]
    return found


def test_small_parameters_are_whole_but_for_a_scoring_pass(paths: dict[str, Path]) -> None:
    """The update that follows fetches them with others: to gather them again would be more, not less."""
    norms = 5  # two in each layer, and the last
    for found in spmd.run(2, whole, tiny.spec(paths["tied"])):
        there = {name: number for name, (number, _) in found.items()}
        assert there == {"generate": norms, "infer": 0, "first": norms, "second": norms, "step": norms}
        assert found["first"] == found["second"]


def held(group: dist.ProcessGroup, spec: Actor | Reference, stage: int) -> dict[str, int]:
    """What an engine holds after a step, where the model learns."""
    engine = train_engine(spec, head="lm", seat=zero.seat(group), config=zero.settings(stage))
    if spec.trains:
        zero.step(engine, zero.own(group))
    return engine.memory()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_mapping_predicts_what_a_rank_holds(
    paths: dict[str, Path], stage: Literal[1, 2, 3], dtype: tiny.Dtype
) -> None:
    path, settings = str(paths["tied"]), Settings(engine="zero", zero=zero.settings(stage))
    for role in (Actor(path=path, dtype=dtype), Reference(path=path, dtype=dtype, decay=0.9)):
        work = recipe(role, settings)
        predicted = memory.footprint(shapes.load(path), ParallelLayout(d=2), work, trained=role.trains)
        for found in spmd.run(2, held, role, stage):
            kept = found["parameters"] + found["optimizer"]
            assert predicted.parameters + predicted.states == pytest.approx(kept, rel=0.02)
            assert stage < 3 or predicted.gradients == pytest.approx(found["gradients"], rel=0.02)
