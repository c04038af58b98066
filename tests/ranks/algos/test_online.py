"""Every online algorithm: it runs, its numbers are finite, and what it trains moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from rlhf_lightning import algos
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import Counts, GroupEstimator, Loss, PolicyLoss, aggregate
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.workers import Actor, Cost, Critic, Reward
from tests.unit.algos.small import run
from tests.unit.pretended import GPU, pretended

OFFLINE = ("CostModel", "DPO", "KTO", "ProcessRewardModel", "RewardModel", "SFT", "SimPO")
ONLINE = [name for name in algos.__all__ if name not in (*OFFLINE, "Distillation")]
"""Those that learn from scores of drawn answers."""
FAST = OptimizerSpec(lr=1e-3)


def make(name: str, path: str, **more: object) -> RLHFAlgorithm:
    """An algorithm whose scores vary even where the model knows nothing."""
    actor = Actor(path=path, optimizer=FAST, sampling=Sampling(max_new_tokens=6))
    options: dict[str, object] = {"actor": actor, "reward": Reward(functions="length"), **more}
    if name in ("PPO", "SafeRLHF"):
        options["critic"] = Critic(optimizer=FAST)
    if name == "SafeRLHF":
        options |= {"cost": Cost(functions={"length": 1.0}), "cost_critic": Critic(optimizer=FAST)}
    kind: Callable[..., RLHFAlgorithm] = getattr(algos, name)
    return kind(**options)


def data(rows: int = 6) -> TaskData:
    return TaskData(batch_size=rows, num_rows=4 * rows, num_val_rows=0)


def moved(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


class Noting(algos.GRPO):
    """Keeps what was drawn, and what is learned from."""

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Note the ids, and the masks before and after."""
        learned, metrics = super().compute_advantage(batch)
        self.seen = batch["response_ids"], batch["response_mask"], learned["response_mask"]
        self.row_ends = learned["row_ends"]
        return learned, metrics


def test_what_was_cut_off_teaches_nothing(model: str) -> None:
    """Any of a fifth of all tokens is an end: some answers have none, some as their last possible token."""
    sampling = Sampling(max_new_tokens=6, stop_token_ids=tuple(range(0, 256, 5)))
    algorithm = Noting(
        actor=Actor(path=model, optimizer=FAST, sampling=sampling),
        reward=Reward(functions="length"),
        mask_truncated=True,
    )
    algorithm.keeps_rollouts = True
    kept = run(algorithm, data(), steps=1)
    ids, mask, learned = algorithm.seen
    assert algorithm.kept_rollouts is not None
    assert torch.equal(algorithm.kept_rollouts["response_mask"], mask)  # told of all that was drawn
    ended = (torch.isin(ids, torch.tensor([*sampling.stop_token_ids, 258])) & mask).any(dim=1)
    assert torch.equal(learned, mask & ended[:, None])
    assert torch.equal(algorithm.row_ends, mask.sum(dim=1) * ended)  # devices are balanced by these
    share = float((~ended).float().mean())
    assert 0 < share < float(mask[:, -1].float().mean())
    assert kept.numbers[0]["response/truncated"] == pytest.approx(share)
    assert kept.numbers[0]["actor/grad_norm"] > 0


@pytest.mark.parametrize("name", ONLINE)
def test_it_learns_and_a_pretended_gpu_learns_the_same(name: str, model: str) -> None:
    both = Reward(functions={"length": 1.0, "exact_match": 1.0})
    kept = run(make(name, model, reward=both), data(), steps=3)
    for numbers in kept.numbers:
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert numbers["reward/length"] + numbers["reward/exact_match"] == pytest.approx(
            numbers["reward/mean"]
        )
    assert set(kept.weights) == {n for n in ("actor", "critic", "cost_critic") if n in kept.first}
    for role, weights in kept.weights.items():
        assert moved(dict(weights), dict(kept.first[role])) > 1e-5, role
    with pretended():
        found = run(make(name, model, reward=both), data(), steps=1)
    assert (kept.devices, found.devices) == ({torch.device("cpu")}, {GPU})
    ours, theirs = (
        {k: v for k, v in numbers.items() if not k.startswith(("time/", "throughput/", "memory/"))}
        for numbers in (found.numbers[0], kept.numbers[0])
    )
    assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-4)


class Choosy(algos.SafeRLHF):
    """Keeps no answer of the first iteration."""

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        return super().compute_advantage(batch if self.global_step else batch.take([]))

    def rollout_metrics(self, batch: Batch) -> dict[str, float]:
        """No answer is no divergence."""
        return super().rollout_metrics(batch) or {"actor/kl": 0.0}


def test_no_answers_have_no_cost(model: str) -> None:
    plain = make("SafeRLHF", model)
    assert isinstance(plain, algos.SafeRLHF)
    algorithm = Choosy(**{option.name: getattr(plain, option.name) for option in fields(plain)})
    nothing, something = run(algorithm, data(), steps=2).numbers
    assert nothing["cost/multiplier"] == 1.0
    assert "cost/mean" not in nothing
    assert 1.0 < something["cost/multiplier"] < math.inf
    assert something["cost/mean"] > 0


@dataclass(frozen=True, kw_only=True)
class Plain(Loss):
    """One of the user's own, in the place of PolicyLoss, whose options it does not have."""

    reference: bool

    @property
    def columns(self) -> tuple[str, ...]:
        """The advantages; the reference's log-probabilities if asked for."""
        return ("advantages", "ref_log_probs") if self.reference else ("advantages",)

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy gradient, and how far the reference is."""
        mask, new = rows["response_mask"], outputs["log_probs"]
        loss = aggregate(-rows["advantages"] * new, mask, "token-mean", counts)
        if not self.reference:
            return loss, {}
        far = aggregate(new.detach() - rows["ref_log_probs"], mask, "token-mean", counts)
        return loss, {"actor/far": far}


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", ["GRPO", "DAPO", "ReMax", "ReinforcePP"])
def test_a_loss_of_ones_own_takes_the_place_of_the_usual(name: str, model: str, *, reference: bool) -> None:
    loss = Plain(reference=reference)
    kept = run(make(name, model, policy_loss=loss, reward_kl_coef=0.0), data(), steps=2)
    assert kept.numbers[-1]["actor/grad_norm"] > 0
    assert ("actor/far" in kept.numbers[-1]) is reference
    assert (kept.reference.numel() > 0) is reference, "loaded, or not"


@dataclass(frozen=True, kw_only=True)
class Kept(GroupEstimator):
    """One of the user's own, which reads the reference and has no penalty."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*super().columns, "ref_log_probs")


class Keeping(algos.GRPO):
    """Has an estimator of its own."""

    def estimator(self) -> GroupEstimator:
        return Kept(group_size=self.group_size)


def test_an_estimator_of_ones_own_may_read_the_reference(model: str) -> None:
    actor = Actor(path=model, sampling=Sampling(max_new_tokens=6))
    keeping = Keeping(actor=actor, reward=Reward(functions="length"), policy_loss=PolicyLoss())
    assert run(keeping, data(), steps=1).numbers[0]["actor/grad_norm"] > 0


class Torn(algos.GRPO):
    """Shuffles answers before it compares those to one prompt."""

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        return super().compute_advantage(batch.take([0, 2, 1, 3, *range(4, len(batch))]))


def test_answers_to_several_prompts_are_not_compared(model: str) -> None:
    algorithm = Torn(actor=Actor(path=model), reward=Reward(functions="length"), group_size=2)
    with pytest.raises(ValueError, match=r"compares 2 .*, and 2 of 6 such groups are of several prompts"):
        run(algorithm, data(), steps=1)


def one(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """The same for every answer."""
    return [1.0 for _ in responses]


class Compared(algos.ReMax):
    """Keeps what the answers and the greedy ones earn."""

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        self.seen = batch["scores"].sum(dim=1), batch["greedy_scores"]
        return super().compute_advantage(batch)


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_greedy_answer_earns_what_a_drawn_one_earns(model: str, group_size: int) -> None:
    actor = Actor(path=model, sampling=Sampling(max_new_tokens=6))
    algorithm = Compared(actor=actor, reward=Reward(functions=f"{__name__}.one"), group_size=group_size)
    run(algorithm, data(), steps=1)
    assert [earned.tolist() for earned in algorithm.seen] == [[1.0] * 6 * group_size] * 2


def number_asked(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """The same for all answers to a prompt."""
    return [float(sum(map(ord, prompt))) for prompt in prompts]


def test_answers_to_a_prompt_are_compared_with_its_own_greedy_one(model: str) -> None:
    actor = Actor(path=model, sampling=Sampling(max_new_tokens=6))
    algorithm = Compared(actor=actor, reward=Reward(functions=f"{__name__}.number_asked"), group_size=3)
    run(algorithm, data(), steps=1)
    drawn, greedy = algorithm.seen
    assert drawn.tolist() == greedy.tolist()
    assert len(set(greedy.tolist())) > 1


class Evaluated(algos.GRPO):
    """Asks for the metrics of the loss before it learns from it."""

    def step(self, batch: Batch) -> Metrics:
        batch = self.answers_to(batch, self.group_size)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reward.compute_reward(batch)
        batch, metrics = self.compute_advantage(batch)
        told = self.actor.compute_loss(batch, loss=self.policy_loss)
        learned = self.actor.update_actor(batch, loss=self.policy_loss)
        self.both = told.fetch(), learned.fetch()
        return metrics | learned


def test_at_its_own_temperature_an_actor_says_generates_and_learns(model: str) -> None:
    sampling = Sampling(max_new_tokens=6, temperature=0.5)
    actor = Actor(path=model, recompute_log_probs=True, sampling=sampling)
    reward, loss = Reward(functions="length"), PolicyLoss(entropy_coef=0.1)
    algorithm = Evaluated(actor=actor, reward=reward, policy_loss=loss)
    kept = run(algorithm, data(), steps=1)
    assert kept.numbers[0]["actor/mismatch_kl"] == pytest.approx(0, abs=1e-9)
    told, learned = algorithm.both
    assert told["actor/entropy"] > 0
    assert told == pytest.approx({name: learned[name] for name in told}, abs=1e-6)


def test_the_better_of_two_answers_comes_first_and_ties_are_left_out() -> None:
    """The first of the first pair is better, the second of the second one, and neither of the third."""
    scores = torch.tensor([3.0, 1.0, 1.0, 3.0, 2.0, 2.0])
    rows = {"scores": scores[:, None], "response_mask": torch.ones(6, 1, dtype=torch.bool)}
    rows |= {"row_truncated": torch.zeros(6, dtype=torch.bool), "number": torch.arange(6)}
    pairs, metrics = algos.OnlineDPO().pair(Batch.of(rows))
    assert pairs["number"].tolist() == [0, 1, 3, 2]
    assert metrics.fetch()["response/ties"] == pytest.approx(1 / 3)


class Paired(algos.OnlineDPO):
    """Keeps the prompts of what is compared."""

    def pair(self, batch: Batch) -> tuple[Batch, Metrics]:
        self.first, self.second = batch["prompt_ids"].view(-1, 2, batch["prompt_ids"].shape[1]).unbind(1)
        return super().pair(batch)


def test_ties_alone_teach_nothing(model: str) -> None:
    actor = Actor(path=model, sampling=Sampling(max_new_tokens=6))
    algorithm = Paired(actor=actor, reward=Reward(functions=f"{__name__}.one"))
    kept = run(algorithm, data(), steps=1)
    assert torch.equal(algorithm.first, algorithm.second), "two answers to each prompt"
    assert kept.numbers[0]["response/ties"] == 1
    assert "dpo/loss" not in kept.numbers[0]
    assert moved(dict(kept.weights["actor"]), dict(kept.fresh["actor"])) == 0
