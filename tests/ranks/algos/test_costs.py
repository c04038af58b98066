"""What SafeRLHF does with costs: a weight that follows them, a critic that learns them, a held-out mean."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlhf_lightning.algos import SafeRLHF
from rlhf_lightning.callbacks import SampleTable
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import PromptData, TaskData
from rlhf_lightning.functional import LagrangianEstimator
from rlhf_lightning.running import KLPenalty
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Cost, Critic, Reward
from tests.unit.algos.short import trainer
from tests.unit.algos.small import run, write_rows

FAST = OptimizerSpec(lr=1e-3)


def one(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """The same for every answer."""
    return [1.0 for _ in responses]


def harm(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """What the row says."""
    return [float(str(row["harm"])) for row in rows]


class Noting(SafeRLHF):
    """Notes the weights of the cost, and the values of the last batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weighed: list[float] = []

    def estimator(self, batch: Batch) -> LagrangianEstimator:
        found = super().estimator(batch)
        self.weighed.append(found.multiplier)
        return found

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Ask the critic of costs once more."""
        if self.cost_critic is not None:
            again = self.cost_critic.compute_values(batch)["values"]
            self.values = batch["cost_values"], again, batch["values"]
        return super().compute_advantage(batch)


def noting(path: str, cost: str, **options: object) -> Noting:
    """Every answer earns 3."""
    return Noting(
        actor=Actor(path=path, optimizer=FAST, sampling=Sampling(max_new_tokens=6)),
        critic=Critic(optimizer=FAST),
        reward=Reward(functions={f"{__name__}.one": 3.0}),
        cost=Cost(functions=f"{__name__}.{cost}"),
        **options,  # type: ignore[arg-type]
    )


def test_the_weight_of_the_cost_follows_the_last_answers(model: str, tmp_path: Path) -> None:
    """Of batches of 3 and a window of 4: an answer of the batch before counts. No critic learns the cost."""
    costs = [1.0, 2.0, 3.0, 0.0, -1.0, 0.5, 9.0, 9.0, 9.0]
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "x", "harm": cost} for cost in costs])
    options = {"multiplier": 2.0, "multiplier_max": 4.0, "multiplier_lr": 0.1, "threshold": 0.5, "window": 4}
    algorithm = noting(model, "harm", cost_critic=None, **options)
    kept = run(algorithm, PromptData(path=path, batch_size=3, shuffle=False), steps=3)
    # The means are 2, 0.625 and 6.875: the weight grows by e to the power of rate, excess and weight.
    first = 2 * math.exp(0.1 * (2 - 0.5) * 2)
    second = first * math.exp(0.1 * (0.625 - 0.5) * first)
    expected = pytest.approx([first, second, 4.0], rel=1e-9)
    assert algorithm.weighed == expected, "before the advantages are weighed"
    assert [numbers["cost/multiplier"] for numbers in kept.numbers] == pytest.approx(algorithm.weighed)
    assert [numbers["cost/mean"] for numbers in kept.numbers] == pytest.approx([2, -1 / 6, 9])
    assert not [name for name in kept.numbers[-1] if name.startswith("cost_critic/")]
    assert kept.weights.keys() == {"actor", "critic"}
    weights = zip(kept.weights["actor"].values(), kept.fresh["actor"].values(), strict=True)
    assert any(not torch.equal(now, before) for now, before in weights)


def test_a_critic_of_costs_learns_costs(model: str) -> None:
    """With lambda and gamma 1 and no penalty all that an answer earns, or costs, is to come at each token."""
    critic = Critic(optimizer=FAST, init_seed=3)
    algorithm = noting(model, "one", cost_critic=critic, lam=1.0, kl=KLPenalty(coef=0.0))
    (numbers,) = run(algorithm, TaskData(batch_size=6, num_rows=6, num_val_rows=2), steps=1).numbers
    told, own, other = algorithm.values
    assert torch.equal(told, own)
    assert not torch.allclose(told, other)
    assert [numbers[f"{name}/returns"] for name in ("critic", "cost_critic")] == pytest.approx([3, 1])
    held_out = algorithm.trainer.callback_metrics
    assert [float(held_out[f"val/{name}"]) for name in ("reward", "cost")] == pytest.approx([3, 1])


def test_held_out_answers_are_explained_and_do_not_move_the_weight(model: str, tmp_path: Path) -> None:
    algorithm, table = noting(model, "one"), SampleTable(per_token=True)
    fitting = trainer(Local(), tmp_path, limit_val_batches=1, callbacks=[table])
    fitting.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=2))
    steered = math.exp(0.1)
    assert algorithm.weighed == pytest.approx([1, steered, steered]), "before the iteration, in it, after it"
