"""vLLM on a GPU takes all of its share or does not start, and the search knows it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import field, replace

import pytest

from rlhf_lightning.algos import GRPO, PPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.engines import VLLM
from rlhf_lightning.functional import PolicyLoss
from rlhf_lightning.mapping import hardware, memory
from rlhf_lightning.mapping.dataflow import Dataflow
from rlhf_lightning.mapping.plan import plan
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.strategies import Auto, auto
from rlhf_lightning.strategies.auto import MappingOption
from rlhf_lightning.strategy_checks import check_layouts
from rlhf_lightning.workers import Actor, Settings
from tests.unit.mapping.simulated import ROLES, flow_of
from tests.unit.mapping.test_recipes import ONE, SEVEN, with_vllm
from tests.unit.mapping.test_search_auto import attached


@pytest.mark.parametrize(
    ("vllm", "fits", "says"),
    [
        (VLLM(), True, ""),
        (VLLM(gpu_memory_utilization=0.6), False, r"takes 0\.6 of each .*gpu_memory_utilization than 0\.6"),
        (VLLM(gpu_memory_utilization=0.95), False, r"takes 0\.95 of each .* \(smaller where models leave"),
        (VLLM(gpu_memory_utilization=1.0), False, r"takes 1 of each device"),
        (VLLM(kv_cache_gib=20.0), True, ""),
        (VLLM(kv_cache_gib=40.0), False, r"takes 40 GiB .* Try a smaller strategy\.settings\.vllm\.kv_cache"),
    ],
)
def test_vllm_starts_where_all_of_its_share_is_free(
    monkeypatch: pytest.MonkeyPatch, vllm: VLLM, *, fits: bool, says: str
) -> None:
    """Of 73.6 usable GB two models leave 46.6, in which vLLM has weights of 13.5, and keys and values."""
    work = with_vllm(monkeypatch, 1, vllm)
    models = dict.fromkeys(("actor", "reference"), SEVEN)
    flow = Dataflow(flow_of(64, roles=tuple(models)).stages[:2])
    costs = SimulatedCosts(hardware.A100, flow, models, workload=work)
    with nullcontext() if fits else pytest.raises(ValueError, match=says):
        found = plan(costs, 1)
        used = found.tasks(found.mappings[0].pools[0])[0].memory_bytes
        taken = work.kv_limit + memory.generation(SEVEN, ONE, work).total if work.kv_limit else 0.4 * 80e9
        assert used == pytest.approx(2 * 2 * SEVEN.num_parameters + taken), "whatever its rows fill"
    native = replace(work, reserves=False, kv_limit=0.0, generation_share=1.0)
    assert plan(SimulatedCosts(hardware.A100, flow, models, workload=native), 1).mappings


def test_vllm_on_a_cpu_takes_what_its_rows_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache of a GiB has memory once it is written: less is enough."""
    work = replace(with_vllm(monkeypatch, 0), prompt=64, response=64)
    (flow,) = flow_of(1, roles=("actor",)).stages[:1]
    costs = SimulatedCosts(hardware.A100, Dataflow((flow,)), {"actor": SEVEN}, workload=work)
    free = 0.5 * 2**30 + costs.working("actor", ONE)
    assert 0 < costs.kv_bytes("actor", ONE, flow.work[0], free) < 0.5 * 2**30


def test_vllm_that_stays_awake_is_refused_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_lightning.workers.settings.require_vllm", lambda: None)
    awake = Settings(generator="vllm", vllm=VLLM(sleep=False))
    strategy = attached(Auto(settings=awake, mapping=MappingOption(hardware="a100-80gb")), PPO())
    assert strategy.plan(2).mappings, "on a CPU"
    monkeypatch.setattr(auto, "num_gpus", lambda: 2)
    with pytest.raises(ValueError, match=r"vllm\.sleep=false with --strategy auto: .* give the placement"):
        strategy.place(ROLES, 2)


class TwoWriters(GRPO):
    """Two models answer, one after the other, and learn from the scores of the first."""

    second: Actor = field(default_factory=Actor)
    """The other."""

    def step(self, batch: Batch) -> Metrics:
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        batch |= {"advantages": batch["ref_log_probs"]}
        second = batch | self.second.generate_sequences(batch)
        metrics = self.actor.update_actor(batch, loss=PolicyLoss())
        return metrics | self.second.update_actor(second, loss=PolicyLoss())


def test_two_that_answer_with_vllm_on_the_same_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fastest puts both on all devices."""
    for module in ("workers.settings", "engines.vllm.config"):
        monkeypatch.setattr(f"rlhf_lightning.{module}.require_vllm", lambda: None)
    for module in ("mapping.observe", "strategies.auto", "strategy_checks"):
        monkeypatch.setattr(f"rlhf_lightning.{module}.num_gpus", lambda: 2)
    option, settings = MappingOption(hardware="a100-80gb"), Settings(generator="vllm")
    algorithm = TwoWriters(policy_loss=PolicyLoss(kl_coef=0.1))
    strategy = attached(Auto(devices=2, settings=settings, mapping=option), algorithm)
    pools = strategy.place(("actor", "reference", "second"), 2)
    with pytest.raises(ValueError, match=r"actor and second answer on the same GPUs"):
        check_layouts(strategy, strategy.algorithm.roles(), pools)
