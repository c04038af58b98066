"""What PPO needs in practice: units, limits, early stops, a reference that follows, two log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch

from rlhf_lightning.algos import GRPO, PPO, SafeRLHF
from rlhf_lightning.callbacks import SampleTable
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import MixedData, TaskData, TextData
from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.functional import (
    Add,
    Counts,
    Estimator,
    GAEEstimator,
    OffPolicyCorrection,
    PolicyLoss,
    SFTLoss,
    alone,
)
from rlhf_lightning.running import KLPenalty, Running, Scaling
from rlhf_lightning.spec import ModelSpec, OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Cost, Critic, Reference, Reward
from tests.unit.algos.short import trainer
from tests.unit.algos.small import run, write_rows

FAST = OptimizerSpec(lr=1e-3)


def actor(path: str) -> Actor:
    return Actor(path=path, optimizer=FAST, sampling=Sampling(max_new_tokens=6))


def ppo(path: str, **options: object) -> PPO:
    parts: dict[str, object] = {
        "actor": actor(path),
        "critic": Critic(optimizer=FAST),
        "reward": Reward(functions={"length": 100.0}),
    }
    return PPO(**{**parts, **options})  # type: ignore[arg-type]


def data() -> TaskData:
    return TaskData(batch_size=6, num_rows=48, num_val_rows=0)


def test_running_units_of_rewards_and_values(model: str) -> None:
    algorithm = ppo(model, scaling=Scaling(rewards=True, reward_clip=3.0, values=True))
    kept = run(algorithm, data(), steps=6)
    assert float(algorithm.running.scores[0]) == 36
    assert float(algorithm.running.returns[0]) == sum(n["response/tokens"] for n in kept.numbers)
    # Scores of about 2 a row: the critic learns numbers of about 1 once their units are known.
    assert abs(kept.numbers[-1]["critic/returns"]) < 1.5
    assert all(abs(n["reward/mean"]) > 0.5 for n in kept.numbers), "what is logged are the raw scores"


def test_the_units_change_what_is_learned(model: str) -> None:
    plain = run(ppo(model), data(), steps=3)
    scaled = run(ppo(model, scaling=Scaling(rewards=True)), data(), steps=3)
    # Scores near 2 that differ by less than 1: divided by their deviation they are larger.
    assert scaled.numbers[-1]["critic/returns"] > 2 * plain.numbers[-1]["critic/returns"]


def test_an_update_that_drifts_is_cut_short(model: str) -> None:
    options = {"mini_batch_size": 2, "epochs": 4}
    free = run(ppo(model, **options), data(), steps=3)
    held = run(ppo(model, stop_kl=0.0, **options), data(), steps=3)
    loose = run(ppo(model, stop_kl=1e3, **options), data(), steps=3)
    assert loose.numbers[-1]["actor/approx_kl"] == free.numbers[-1]["actor/approx_kl"]
    assert free.numbers[-1]["actor/ratio"] != pytest.approx(1, abs=1e-4)
    assert all(numbers["actor/lr"] > 0 for numbers in held.numbers), "the first mini-batch counts"
    assert held.numbers[-1]["actor/approx_kl"] < 0.2 * free.numbers[-1]["actor/approx_kl"]


def test_the_weight_of_the_penalty_is_steered_by_the_divergence(model: str) -> None:
    """A tenth above the target, over 6 rows where the horizon is 60."""

    def steered(target: float | None, *, steps: int) -> list[dict[str, float]]:
        kl = KLPenalty(coef=0.1, estimator="k3", target=target, horizon=60.0)
        return run(ppo(model, reference=Reference(init_seed=7), kl=kl), data(), steps=steps).numbers

    (before,) = steered(None, steps=1)
    assert before["actor/kl"] > 1e-3
    first, second = steered(before["actor/kl"] / 1.1, steps=2)
    weights = [numbers["actor/kl_coef"] for numbers in (first, second)]
    assert weights == pytest.approx([0.1, 0.1 * (1 + 0.1 * 6 / 60)], rel=1e-6)  # logged as float32


def test_a_weight_of_0_in_a_checkpoint_is_that_of_the_option() -> None:
    """As of a run without a penalty, which would never rise from there."""
    running = Running(KLPenalty(coef=0.1, target=1.0), Scaling())
    running.kl_coef.fill_(0.0)
    assert running.coef == 0.1


class Unmeasured(PolicyLoss):
    """A loss that says nothing but its value."""

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], rows: Mapping[str, torch.Tensor], counts: Counts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, _ = super().__call__(outputs, rows, counts)
        return loss, {"actor/loss": loss.detach()}


def test_a_limit_of_the_drift_needs_a_loss_that_measures_it(model: str) -> None:
    run(ppo(model, policy_loss=Unmeasured()), data(), steps=1)
    with pytest.raises(
        ValueError,
        match=r"^stop_kl=0\.1: reads actor/approx_kl, and the actor's loss returns no such metric\. Return "
        r"it as PolicyLoss does, or leave stop_kl out\.$",
    ):
        run(ppo(model, policy_loss=Unmeasured(), stop_kl=0.1), data(), steps=1)


class Masked(PPO):
    """Learns nothing from its answers."""

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        batch, metrics = super().compute_advantage(batch)
        return batch | {"response_mask": torch.zeros_like(batch["response_mask"])}, metrics


@pytest.mark.parametrize("coef", [0.0, 1.0])
def test_where_nothing_is_learned_nothing_drifts(coef: float, model: str, tmp_path: Path) -> None:
    plain = ppo(model, stop_kl=0.1, ptx_loss=SFTLoss(coef=coef))
    algorithm = Masked(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": f"text number {n}"} for n in range(40)])
    text = TextData(path=texts, block_tokens=16, batch_size=3)
    (told,) = run(algorithm, MixedData(main=data(), ptx=text) if coef else data(), steps=1).numbers
    assert "actor/approx_kl" not in told
    assert ("actor/grad_norm" in told) == ("ptx/loss" in told) == bool(coef)


@dataclass(frozen=True, kw_only=True)
class Outcome(Estimator):
    """Makes what is learned from, and measures nothing."""

    @property
    def columns(self) -> tuple[str, ...]:
        return ("scores", "response_mask")

    @property
    def returns(self) -> tuple[str, ...]:
        return ("advantages", "returns")

    def __call__(self, rows: Mapping[str, torch.Tensor], add: Add = alone) -> dict[str, torch.Tensor]:
        outcomes = rows["scores"].sum(dim=1, keepdim=True) * rows["response_mask"]
        return {"advantages": outcomes, "returns": outcomes}


class Estimating(PPO):
    """Has an estimator of its own."""

    def estimator(self, batch: Batch) -> Estimator:
        return Outcome()


def estimating(path: str, **options: object) -> Estimating:
    plain = ppo(path, **options)
    return Estimating(**{field.name: getattr(plain, field.name) for field in fields(plain)})


def test_an_estimator_of_ones_own_returns_what_options_read(model: str) -> None:
    (told,) = run(estimating(model), data(), steps=1).numbers
    assert told["actor/grad_norm"] > 0
    assert "actor/kl" not in told
    lacks = r"which the estimator does not return\. Return what GAEEstimator does, or leave"
    with pytest.raises(ValueError, match=rf"^kl\.target=1\.0: reads row_kl, {lacks} kl\.target out\.$"):
        run(estimating(model, kl=KLPenalty(target=1.0)), data(), steps=1)
    reads = r"^scaling\.values=true: reads row_returns, row_squares, row_tokens,"
    with pytest.raises(ValueError, match=rf"{reads} {lacks} scaling\.values out\.$"):
        run(estimating(model, scaling=Scaling(values=True)), data(), steps=1)


def test_only_the_critic_learns_at_first(model: str) -> None:
    kept = run(ppo(model, critic_warmup_steps=2), data(), steps=3)
    assert ["actor/loss" in numbers for numbers in kept.numbers] == [False, False, True]
    fresh, first, last = (
        torch.cat([weight.flatten() for weight in weights["actor"].values()])
        for weights in (kept.fresh, kept.first, kept.weights)
    )
    assert torch.equal(first, fresh)
    assert not torch.equal(last, fresh)


def test_what_steers_the_actor_waits_until_it_learns(model: str) -> None:
    algorithm = SafeRLHF(
        actor=actor(model),
        reward=Reward(functions="length"),
        cost=Cost(functions={"length": 1.0}),
        kl=KLPenalty(target=1e-3, horizon=100.0),
        critic_warmup_steps=2,
    )
    told = run(algorithm, data(), steps=4).numbers
    assert ["actor/loss" in numbers for numbers in told] == [False, False, True, True]
    assert [numbers["actor/kl_coef"] for numbers in told[:3]] == pytest.approx([0.05, 0.05, 0.05])
    assert told[3]["actor/kl_coef"] == pytest.approx(0.05 * (1 - 0.2 * 6 / 100))
    assert [numbers["cost/multiplier"] for numbers in told[:2]] == [1.0, 1.0]
    costs = fmean(numbers["cost/mean"] for numbers in told[:3])  # those of the warm-up count
    assert costs > 0
    assert told[2]["cost/multiplier"] == pytest.approx(math.exp(0.1 * costs))


def test_the_critic_begins_as_the_reward_model(model: str, tmp_path: Path) -> None:
    directory = tmp_path / "reward"
    FSDPEngine(ModelSpec(path=model, init_seed=3), head="reward").export(directory)
    score = FSDPEngine(ModelSpec(path=str(directory)), head="scalar")
    with score.gathered() as module:
        begins = module.get_parameter("score.weight").clone()
    critic = Critic(path=str(directory), optimizer=replace(FAST, lr=0.0))
    kept = run(ppo(model, critic=critic, reward=Reward(path=str(directory))), data(), steps=1)
    assert torch.equal(kept.weights["critic"]["score.weight"], begins)


def test_two_log_probabilities_are_told_apart(model: str) -> None:
    loss = PolicyLoss(correction=OffPolicyCorrection())
    recomputing = replace(actor(model), recompute_log_probs=True)
    kept = run(ppo(model, actor=recomputing, policy_loss=loss), data(), steps=2)
    assert kept.numbers[-1]["actor/mismatch_ratio"] == pytest.approx(1, abs=1e-4)
    assert math.isfinite(kept.numbers[-1]["actor/mismatch_kl"])


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_the_reference_follows(model: str, decay: float) -> None:
    loss = PolicyLoss(kl_coef=0.01)
    algorithm = GRPO(
        actor=actor(model),
        reference=Reference(decay=decay),
        reward=Reward(functions="length"),
        policy_loss=loss,
        group_size=3,
    )
    kept = run(algorithm, data(), steps=1)
    fresh = FSDPEngine(ModelSpec(path=model, init_seed=0)).give_weights()
    trained = torch.cat([w.flatten() for n, w in kept.weights["actor"].items() if n != "lm_head.weight"])
    now = kept.reference
    torch.testing.assert_close(now, decay * fresh + (1 - decay) * trained, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("every", "steps", "moved"), [(2, 1, False), (2, 2, True), (2, 3, False), (3, 3, True)]
)
def test_the_reference_is_replaced_now_and_then(model: str, every: int, steps: int, *, moved: bool) -> None:
    algorithm = GRPO(
        actor=actor(model),
        reference=Reference(decay=0.0, every=every),
        reward=Reward(functions="length"),
        policy_loss=PolicyLoss(kl_coef=0.01),
        group_size=3,
    )
    kept = run(algorithm, data(), steps=steps)
    trained = torch.cat([w.flatten() for n, w in kept.weights["actor"].items() if n != "lm_head.weight"])
    fresh = FSDPEngine(ModelSpec(path=model, init_seed=0)).give_weights()
    assert torch.equal(kept.reference, trained) is moved
    assert torch.equal(kept.reference, fresh) is (steps < every)


def test_a_weight_that_does_not_adapt_is_that_of_the_options() -> None:
    before = Running(KLPenalty(coef=0.05), Scaling())
    fixed = Running(KLPenalty(coef=0.2), Scaling())
    adapted = Running(KLPenalty(coef=0.2, target=1.0), Scaling())
    for now in (fixed, adapted):
        now.load_state_dict(before.state_dict())
    assert [fixed.coef, adapted.coef] == pytest.approx([0.2, 0.05])


def test_a_weight_that_was_0_adapts_from_that_of_the_options() -> None:
    without = Running(KLPenalty(coef=0.0), Scaling())
    rows = Batch.of({"scores": torch.zeros(10, 1)})
    without.learn(rows, kl=3.0)
    now = Running(KLPenalty(coef=0.2, target=1.0), Scaling())
    now.load_state_dict(without.state_dict())
    assert now.coef == 0.2
    now.learn(rows, kl=3.0)
    assert now.coef == pytest.approx(0.2 * (1 + 0.2 * 10 / 10_000))


def test_units_are_those_of_all_rows_so_far_but_for_what_is_only_told() -> None:
    running = Running(KLPenalty(coef=0.3, target=1.0), Scaling(rewards=True, values=True))
    first, second = ([[1.0, 0.0], [2.0, 3.0]], [[4.0, 5.0], [0.0, 3.0]])  # outcomes 1 5 and 9 3
    learned = {"row_returns": [6.0, 2.0], "row_squares": [20.0, 4.0], "row_tokens": [2, 2]}
    all_valid = torch.ones(2, 2, dtype=torch.bool)
    batches = [
        Batch.of({"scores": torch.tensor(scores), "response_mask": all_valid}) for scores in (first, second)
    ]
    running.learn(Batch.of({name: torch.tensor(column) for name, column in learned.items()}), kl=0.5)
    for batch, learn, outcomes in (
        (batches[0], True, [1, 5]),
        (batches[1], False, [1, 5]),
        (batches[1], True, [1, 5, 9, 3]),
    ):
        found = running.fitted(GAEEstimator(), batch, learn=learn)
        assert found.score_scale == pytest.approx(1 / pstdev(outcomes))
        assert [found.value_mean, found.value_std] == pytest.approx([2.0, 2**0.5])  # 24 / 4 - 2^2
        assert found.kl_coef == pytest.approx(0.3 * (1 - 0.2 * 2 / 10_000), rel=1e-9)


class Explained(PPO):
    """Keeps the divergences of the tokens of the first table."""

    found: tuple[float, ...] = ()

    def explain(self, batch: Batch) -> Batch:
        rows = super().explain(batch)
        self.found = self.found or tuple(rows["kl"][rows["response_mask"]].tolist())
        return rows


def test_a_table_compares_at_one_temperature(model: str, tmp_path: Path) -> None:
    sampling = Sampling(max_new_tokens=6, temperature=0.5)
    algorithm = Explained(
        actor=Actor(path=model, sampling=sampling),
        reward=Reward(functions={"length": 1.0}),
        scaling=Scaling(rewards=True, values=True),
    )
    looks: dict[str, object] = {"num_sanity_val_steps": 1, "callbacks": [SampleTable(per_token=True)]}
    fit = trainer(Local(), tmp_path, steps=1, limit_val_batches=None, **looks)
    fit.fit(algorithm, datamodule=TaskData(batch_size=6, num_rows=6, num_val_rows=4))
    # Before anything was learned.
    assert algorithm.found
    assert max(map(abs, algorithm.found)) < 1e-5
    # Explaining held-out answers taught nothing.
    assert float(algorithm.running.scores[0]) == 6
    assert float(algorithm.running.returns[0]) == float(fit.logged_metrics["response/tokens"])


class Plain(PPO):
    """Answers, scores and tells of it, without an estimator."""

    def step(self, batch: Batch) -> Metrics:
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reward.compute_reward(batch)
        return Metrics.of(self.rollout_metrics(batch))


def test_a_step_without_an_estimator_tells_of_its_answers(model: str) -> None:
    judge = Reward(functions={"length": 100.0})
    (told,) = run(Plain(actor=actor(model), reward=judge), data(), steps=1).numbers
    (usual,) = run(ppo(model), data(), steps=1).numbers
    names = [n for n in usual if n.startswith(("reward/", "response/"))]
    assert len(names) == 8
    assert {n: told[n] for n in names} == pytest.approx({n: usual[n] for n in names})
