"""Every stage of ZeRO trains as the FSDP engine does on one device."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.utils import groups
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines import FSDP, Head, TrainEngine, ZeRO
from rlhf_lightning.engines.deepspeed import config
from rlhf_lightning.engines.deepspeed.engine import ZeROEngine
from rlhf_lightning.parallel import ModelGroups, ParallelLayout, Seat
from rlhf_lightning.spec import ModelSpec, OptimizerSpec
from rlhf_lightning.workers import Settings
from tests.extras import zero
from tests.extras.zero import Trained
from tests.unit import spmd
from tests.unit.engines import tiny

SAME = 1e-5
"""float32, in another order."""
TRAINED = 1e-4
"""Adam divides by the root of squares: what is rounding in the gradient can be much in the step."""


@cache
def expected(spec: ModelSpec, head: Head) -> Trained:
    """On one device."""
    return zero.train(zero.fsdp(spec, head=head), tiny.rows())


@dataclass(frozen=True)
class Case:
    stage: int
    shares: tuple[tuple[tuple[int, ...], ...], ...]
    """By rank: the rows of each portion whose gradients add up."""
    model: str = "tied"
    head: Head = "lm"
    recompute: bool = False
    options: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"stage{self.stage}", self.model, self.head, f"d{len(self.shares)}", *self.options]
        return "-".join([*words, "recompute"] if self.recompute else words)


ALL = ((tuple(range(6)),),)
EVEN = (((0, 2, 4),), ((1, 3, 5),))
UNEVEN = (((), ()), ((0, 1, 2, 3), (4, 5)))
"""None on the first rank, and two portions on the second."""
PORTIONS = (((5, 1), (0,)), ((), (2, 3, 4)))
THIRDS = (((0, 3),), ((1, 4),), ((2, 5),))
"""On as many ranks the last shards are padded, and borders cut parameters."""
CASES = [
    Case(3, ALL, model="lm"),
    Case(1, UNEVEN),
    Case(2, UNEVEN, recompute=True),
    Case(3, UNEVEN, model="lm"),
    Case(3, PORTIONS, recompute=True, options={"bucket_numbers": 500}),
    Case(3, EVEN, options={"whole_below": 200, "offload_optimizer": True, "offload_parameters": True}),
    Case(2, PORTIONS, options={"offload_optimizer": True}),
    Case(1, THIRDS),
    Case(3, THIRDS),
    Case(2, EVEN, model="scalar", head="scalar"),
    Case(3, EVEN, model="scalar", head="reward"),
]


def trained(group: dist.ProcessGroup, case: Case, spec: ModelSpec) -> Trained:
    engine = zero.zero(group, spec, case.stage, head=case.head, **case.options)
    calls = Counter[str]()
    for name in (once := "embed_tokens", again := "layers.0.self_attn"):
        part = engine._model.base_model.get_submodule(name)
        part.register_forward_pre_hook(lambda *_, name=name: calls.update({name: torch.is_grad_enabled()}))
    found = zero.train(engine, *(tiny.rows()[list(rows)] for rows in case.shares[group.rank()]))
    assert calls[again] == (2 if case.recompute else 1) * calls[once] > 0
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_stage_trains_as_one_device_does(paths: dict[str, Path], case: Case) -> None:
    plain = tiny.spec(paths[case.model], eps=1e-5)
    theirs, spec = expected(plain, case.head), replace(plain, gradient_checkpointing=case.recompute)
    results = spmd.run(len(case.shares), trained, case, spec)
    for share, ours in zip(case.shares, results, strict=True):
        for name, values in theirs.outputs.items():
            rows = [row for portion in share for row in portion]
            torch.testing.assert_close(ours.outputs[name], values[rows], rtol=SAME, atol=SAME)
        for found, wanted in zip(ours.reports, theirs.reports, strict=True):
            assert found == pytest.approx(wanted, rel=SAME)
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=TRAINED)
    totals = {name: sum(ours.metrics[name] for ours in results) for name in theirs.metrics}
    assert totals == pytest.approx(theirs.metrics, rel=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_experts_draw_nothing(tmp_path: Path, stage: int) -> None:
    plain = tiny.spec(tiny.write_experts(tmp_path), eps=1e-5)
    case, theirs = Case(stage, ALL, recompute=True), expected(plain, "lm")
    (ours,) = spmd.run(1, trained, case, replace(plain, gradient_checkpointing=True))
    assert ours.metrics == pytest.approx(theirs.metrics, rel=SAME)
    for found, wanted in zip(ours.reports, theirs.reports, strict=True):
        assert found == pytest.approx(wanted, rel=SAME)


def in_bfloat16(group: dist.ProcessGroup, spec: ModelSpec) -> list[tuple[Tensor, set[torch.dtype], Trained]]:
    """Of all stages: masters before a step, types of the parameters, and what training gives."""
    found = []
    for stage in (1, 2, 3):
        engine = zero.zero(group, spec, stage)
        with engine.gathered() as module:
            types = {parameter.dtype for parameter in module.parameters()}
        masters = engine.give_weights()
        first = group.rank() == 0
        assert len(engine.give_weights(wanted=first)) == (len(masters) if first else 0)
        found.append((masters, types, zero.train(engine, zero.own(group))))
    return found


def test_bfloat16_has_masters_and_gradients_in_float32(paths: dict[str, Path]) -> None:
    spec = tiny.spec(paths["tied"], dtype="bfloat16")
    theirs, files = expected(spec, "lm"), zero.fsdp(spec).give_weights()
    for stages in spmd.run(2, in_bfloat16, spec):
        for masters, types, ours in stages:
            assert torch.equal(masters, files)
            assert types == {torch.bfloat16}
            norms = [report["grad_norm"] for report in ours.reports]
            assert norms == pytest.approx([report["grad_norm"] for report in theirs.reports], rel=1e-2)
            assert float((ours.weights - theirs.weights).norm() / theirs.weights.norm()) < 1e-2
            # Steps of 1e-3 would be lost on most weights of bfloat16.
            assert not torch.equal(ours.weights, ours.weights.bfloat16().float())


def in_all_stages(group: dist.ProcessGroup, specs: list[ModelSpec]) -> list[list[Trained]]:
    """By stage, of models that are to be the same."""
    return [
        [zero.train(zero.zero(group, spec, stage), zero.own(group)) for spec in specs] for stage in (1, 2, 3)
    ]


def moved(engine: TrainEngine, *portions: TensorDict) -> Tensor:
    """The weights' move in a step."""
    before = engine.give_weights()
    for portion in portions:
        zero.step_into(engine, portion)
    engine.optimizer_step()
    return engine.give_weights() - before


def moved_in_all_stages(group: dist.ProcessGroup, spec: ModelSpec) -> list[Tensor]:
    return [moved(zero.zero(group, spec, stage), zero.own(group)) for stage in (1, 2, 3)]


def test_gradients_of_bfloat16_are_summed_over_ranks_in_float32(paths: dict[str, Path]) -> None:
    """The step is in proportion to the gradient, which summed in bfloat16 would be 1e-3 off."""
    optimizer = OptimizerSpec(lr=1e9, eps=1e6, grad_clip=0.0)
    spec = replace(tiny.spec(paths["tied"], dtype="bfloat16"), optimizer=optimizer)
    expected = moved(zero.fsdp(spec), *(tiny.rows()[rank::2] for rank in range(2)))
    assert float((expected.bfloat16() - expected).norm() / expected.norm()) > 1e-3
    for stages in spmd.run(2, moved_in_all_stages, spec):
        for found in stages:
            assert float((found - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_same_model_whatever_type_its_files_have(tmp_path: Path, dtype: tiny.Dtype) -> None:
    specs = [tiny.spec(path, dtype=dtype) for path in tiny.write_in_types(tmp_path)]
    for mine, theirs in chain(*spmd.run(2, in_all_stages, specs)):
        assert torch.equal(mine.weights, theirs.weights)
        assert torch.equal(mine.outputs["log_probs"], theirs.outputs["log_probs"])


def skipped(group: dist.ProcessGroup, specs: list[ModelSpec]) -> list[tuple[bool, dict[str, float], float]]:
    """Whether the weights stayed, the report, and the norm of the next step."""
    found = []
    for spec in specs:
        for stage, offload in product((1, 2, 3), (False, True)):
            engine = zero.zero(group, spec, stage, offload_optimizer=offload)
            before = engine.give_weights()
            engine.accumulate(zero.own(group), tiny.Broken(), tiny.counts(), temperature=1.0)
            report, version = engine.optimizer_step(), engine.version
            stayed = torch.equal(engine.give_weights(), before) and version == 0
            found.append((stayed, report, zero.step(engine, zero.own(group))["grad_norm"]))
            assert engine.version == 1
    return found


def test_a_step_without_a_number_is_left_out(paths: dict[str, Path]) -> None:
    specs = [tiny.spec(paths["tied"]), tiny.spec(paths["tied"], dtype="bfloat16")]
    wanted = [expected(spec, "lm").reports[0]["grad_norm"] for spec in specs for _ in range(6)]
    for found in spmd.run(2, skipped, specs):
        for (stayed, report, norm), theirs in zip(found, wanted, strict=True):
            assert stayed
            assert report == {"grad_norm": torch.inf, "lr": 1e-3, "skipped_steps": 1.0}
            assert norm == pytest.approx(theirs, rel=1e-4)


def overlapping(
    group: dist.ProcessGroup, actor: ModelSpec, critic: ModelSpec, critic_stage: int
) -> dict[str, Tensor]:
    """An actor on ranks 0 and 1, a critic on 1 and 2, their steps mixed; then what is left of them."""
    before, linear = dict(os.environ), torch.nn.functional.linear
    layout, cpu = ParallelLayout(d=2), torch.device("cpu")
    engines: dict[str, ZeROEngine] = {}
    for name, ranks, spec in (("actor", (0, 1), actor), ("critic", (1, 2), critic)):
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for members in (ranks, *((rank,) for rank in ranks)):
            made[members] = dist.new_group(members)
        if group.rank() in ranks:
            mine = ranks.index(group.rank())
            found = {tuple(ranks.index(rank) for rank in members): one for members, one in made.items()}
            seat = Seat(mine, layout, cpu, None, ModelGroups.create(layout, mine, found.__getitem__))
            head: Head = "lm" if name == "actor" else "scalar"
            engines[name] = ZeROEngine(
                spec, head=head, seat=seat, config=zero.settings(3 if name == "actor" else critic_stage)
            )
    for _ in range(zero.STEPS):
        for engine in engines.values():
            half = engine._group.rank()
            zero.step(engine, tiny.rows()[half::2])
    assert dict(os.environ) == before
    assert torch.nn.functional.linear is linear
    assert comm.cdb is None
    assert groups.mpu is None
    assert groups._WORLD_GROUP is None
    return {name: engine.give_weights() for name, engine in engines.items()}


@pytest.mark.parametrize("critic_stage", [2, 3])
def test_engines_on_overlapping_ranks_share_a_process(paths: dict[str, Path], critic_stage: int) -> None:
    actor, critic = tiny.spec(paths["tied"]), tiny.spec(paths["scalar"])
    wanted = {"actor": expected(actor, "lm").weights, "critic": expected(critic, "scalar").weights}
    found = spmd.run(3, overlapping, actor, critic, critic_stage)
    assert [sorted(engines) for engines in found] == [["actor"], ["actor", "critic"], ["critic"]]
    for engines in found:
        for name, weights in engines.items():
            torch.testing.assert_close(weights, wanted[name], rtol=0, atol=TRAINED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, r"^strategy.settings.zero.stage=4: ZeRO has stages 1, 2 and 3"),
        (
            {"max_tokens_per_micro_batch": -1},
            r"^strategy.settings.zero.max_tokens_per_micro_batch=-1: is negative",
        ),
        ({"whole_below": -1}, r"^strategy.settings.zero.whole_below=-1: is negative"),
        ({"bucket_numbers": 0}, r"^strategy.settings.zero.bucket_numbers=0: must be even and above 0"),
        ({"bucket_numbers": 3}, r"^strategy.settings.zero.bucket_numbers=3: must be even"),
        (
            {"offload_parameters": True},
            r"^strategy.settings.zero.offload_parameters with stage=2: only stage 3 .* Try stage=3",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeRO(**options)


def test_options_reach_deepspeed_and_the_engine_of_frozen_models() -> None:
    settings = ZeRO(stage=3, offload_optimizer=True, offload_parameters=True, max_tokens_per_micro_batch=7)
    told = settings.for_deepspeed(ModelSpec(path=""), numbers=9, on_cpu=True)["zero_optimization"]
    host = {"device": "cpu", "pin_memory": False}
    wanted = {"stage": 3, "reduce_bucket_size": 10, "offload_optimizer": host, "offload_param": host}
    assert isinstance(told, dict)
    assert {name: told.get(name) for name in wanted} == wanted
    for stage in (1, 2, 3):
        on_gpus = ZeRO(stage=stage).for_deepspeed(ModelSpec(path=""), numbers=9, on_cpu=False)
        # Stages 1 and 2 overlap with one backward pass a step, and here a step has several.
        assert cast("dict[str, object]", on_gpus["zero_optimization"])["overlap_comm"] == (stage == 3)
    assert settings.for_frozen() == FSDP(shard=0, max_tokens_per_micro_batch=7)
    assert replace(settings, stage=2, offload_parameters=False).for_frozen().shard == 1


def test_what_zero_cannot_do_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for p, t in ((1, 2), (2, 1)):
        with pytest.raises(
            ValueError, match=rf"p={p}, t={t}: under ZeRO every rank computes the whole model"
        ):
            ZeRO().check(ModelSpec(path=""), "lm", ParallelLayout(p=p, t=t))
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"^strategy.settings.engine=zero: DeepSpeed is not installed. Try: pip install .*\[deepspeed\]"
        "'; or --strategy.settings.engine fsdp under a strategy that takes it",
    ):
        Settings(engine="zero")
