"""A model that the step that was read does not call takes memory, and sizes of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import PolicyLoss
from rlhf_lightning.mapping import hardware, report, shapes
from rlhf_lightning.mapping.plan import plan
from rlhf_lightning.mapping.report import Request
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.strategies import Auto
from rlhf_lightning.strategies.auto import MappingOption
from rlhf_lightning.workers import Settings
from tests.unit.mapping.simulated import SEVEN, flow_of
from tests.unit.mapping.test_search_auto import attached


def test_a_model_that_no_step_calls_takes_memory_and_sizes_of_its_own() -> None:
    """13B beside 7B on two devices: 13.5 GB more than there are, though it has nothing to do."""
    flow, alone = flow_of(64, roles=("actor",)), {"actor": SEVEN}
    idle = alone | {"reference": replace(shapes.load("llama-13b"), heads=5, kv_heads=5)}
    without, with_it = (
        SimulatedCosts(hardware.A100, flow, models, workload=Workload()) for models in (alone, idle)
    )
    assert plan(without, 2, sizes=(2,)).mappings
    with pytest.raises(ValueError, match=r"^actor, reference do not fit on 2 x .* are missing"):
        plan(with_it, 2, sizes=(2,))
    (pool,) = plan(with_it, 4, sizes=(4,)).mappings[0].pools
    at = pool.at
    assert at["actor"].p * at["actor"].t > 1
    assert at["reference"] == ParallelLayout(p=4)
    assert with_it.resident("reference", at["reference"]) > 6e9


class Seldom(GRPO):
    """Asks the reference in one iteration of a hundred, which is not the one that is read."""

    def step(self, batch: Batch) -> Metrics:
        batch = self.answers_to(batch, self.group_size)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reward.compute_reward(batch)
        if self.global_step % 100 == 1:
            batch |= self.reference.compute_ref_log_prob(batch)
        batch, metrics = self.compute_advantage(batch)
        return metrics | self.actor.update_actor(batch, loss=self.policy_loss)

    def uncalled(self) -> tuple[str, ...]:
        """None, over many iterations."""
        return ()


def test_a_model_that_the_read_step_does_not_call_is_placed_by_the_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reference takes memory alone, and has the sizes that the search counts."""
    file = tmp_path / "machine.yaml"
    cramped = replace(hardware.CPU, memory_bytes=90e6, gpus_per_node=4, intra_bandwidth=1e12)
    hardware.save(cramped, file)
    strategy = attached(
        Auto(devices=4, mapping=MappingOption(hardware=str(file)), settings=Settings(engine="megatron")),
        Seldom(group_size=2, policy_loss=PolicyLoss()),
    )
    (placed,) = strategy.place(("actor", "reference", "reward"), 4)
    assert placed.roles == ("actor", "reference", "reward")
    found, roles = strategy.plan(4), strategy.algorithm.roles()
    (pool,) = found.mappings[0].pools
    at = pool.at
    for name in ("actor", "reference"):
        layout = strategy.layout(roles[name], name, 4)
        assert (layout.p, layout.t, layout.d) == (at[name].p, at[name].t, at[name].d)
    kept = sum(found.costs.resident(name, layout) for name, layout in at.items())
    assert min(task.memory_bytes for task in found.tasks(pool)) > kept
    assert kept > found.costs.resident("actor", at["actor"]) > 0
    assert "reference, which no step calls, takes" in caplog.text
    asked = Request("seldom", {"actor": "here", "reference": "here", "reward": ""}, "auto")
    written = yaml.safe_load(report.as_yaml(found, found.mappings[0], asked))
    (option,) = written["strategy"]["init_args"]["mapping"]["pools"]
    assert option["roles"] == ["actor", "reference", "reward"]
    sizes = {name: (one["p"], one["t"]) for name, one in option["sizes"].items()}
    assert sizes == {name: (layout.p, layout.t) for name, layout in at.items() if layout.p * layout.t > 1}
    assert sizes
