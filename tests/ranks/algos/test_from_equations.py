"""PPO computed again from its equations: float64, one answer at a time, torch's AdamW, nothing of ours.

What it shares with the run are the options, the weights at the start, and the answers and their scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import Batch
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP
from rlhf_lightning.functional import PolicyLoss, ValueLoss
from rlhf_lightning.running import KLPenalty
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.workers import Actor, Critic, Reward, Settings
from tests.unit.algos.small import Numbers, run

STEPS = 3
LR, WARMUP, TOTAL, DECAY, EPS = 1e-2, 2, 20, 0.1, 1e-4
"""The optimizers'. A usual epsilon would make whole steps out of rounding where a gradient is 0."""
NORMS = {"actor": 0.05, "critic": 0.5}
"""Where gradients are clipped."""
GAMMA, LAM, TARGET, HORIZON = 0.9, 0.8, 0.01, 40.0
LOW, HIGH, DUAL, VALUE_CLIP, ENTROPY, IN_LOSS = 0.01, 0.02, 1.015, 0.01, 0.02, 0.3
TEMPERATURE = 1.3
Columns = Mapping[str, Tensor]
PARTS = FSDP(max_tokens_per_micro_batch=40)
SETTINGS = {
    "micro-batches": Settings(train=PARTS),
    "kept-passes": Settings(train=replace(PARTS, kept_tokens=4000), advantages="workers"),
}


class Noting(PPO):
    """Keeps what each iteration learns from: all rows, and which of them a mini-batch has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noted: list[tuple[Columns, list[list[int]]]] = []

    def mini_batches(self, batch: Batch, *, size: int, epochs: int = 1, together: int = 1) -> Iterator[Batch]:
        names = ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "scores")
        ids, minis = batch["row_ids"].tolist(), list[list[int]]()
        self.noted.append(({name: batch[name] for name in names}, minis))
        for mini in super().mini_batches(batch, size=size, epochs=epochs, together=together):
            minis.append([ids.index(row) for row in mini["row_ids"].tolist()])
            yield mini


def optimizer(role: str) -> OptimizerSpec:
    return OptimizerSpec(
        lr=LR,
        eps=EPS,
        weight_decay=DECAY,
        grad_clip=NORMS[role],
        warmup_steps=WARMUP,
        schedule="linear",
        total_steps=TOTAL,
    )


def algorithm(path: str) -> Noting:
    sampling = Sampling(max_new_tokens=6, temperature=TEMPERATURE, stop_token_ids=tuple(range(0, 256, 4)))
    loss = PolicyLoss(
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=DUAL,
        entropy_coef=ENTROPY,
        kl_coef=IN_LOSS,
        aggregation="seq-mean-token-mean",
    )
    return Noting(
        actor=Actor(path=path, optimizer=optimizer("actor"), sampling=sampling),
        critic=Critic(optimizer=optimizer("critic")),
        reward=Reward(functions="length"),
        policy_loss=loss,
        value_loss=ValueLoss(clip=VALUE_CLIP),
        kl=KLPenalty(coef=0.2, estimator="k3", target=TARGET, horizon=HORIZON),
        gamma=GAMMA,
        lam=LAM,
        mini_batch_size=4,
        epochs=2,
    )


class Learner:
    """A model in float64 with torch's AdamW."""

    def __init__(self, model: PreTrainedModel, weights: Columns, norm: float) -> None:
        self.model = model.double().train(mode=False)
        self.model.load_state_dict({name: value.double() for name, value in weights.items()})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, eps=EPS, weight_decay=DECAY)
        self.norm, self.steps = norm, 0

    def read(self, rows: Columns, i: int) -> tuple[Tensor, Tensor]:
        """Hidden states before each token of an answer [T, H], and the answer [T]."""
        prompt = rows["prompt_ids"][i][rows["prompt_mask"][i].bool()]
        answer = rows["response_ids"][i][rows["response_mask"][i]]
        hidden = self.model.base_model(torch.cat([prompt, answer])[None]).last_hidden_state[0]
        return hidden[len(prompt) - 1 : -1], answer

    def values(self, rows: Columns, i: int) -> Tensor:
        values: Tensor = self.model.score(self.read(rows, i)[0])[:, 0]
        return values

    def log_probs(self, rows: Columns, i: int) -> tuple[Tensor, Tensor]:
        """Log-probability of each token of an answer, and the entropy there."""
        hidden, answer = self.read(rows, i)
        logs = (self.model.lm_head(hidden) / TEMPERATURE).log_softmax(dim=-1)
        return logs.gather(1, answer[:, None])[:, 0], -(logs.exp() * logs).sum(dim=-1)

    def step(self, loss: Tensor) -> dict[str, float]:
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.norm)
        after = max(self.steps - WARMUP, 0) / (TOTAL - WARMUP)
        rate = LR * min((self.steps + 1) / (WARMUP + 1), 1 - after)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.steps += 1
        return {"grad_norm": float(norm), "lr": rate}


def k3(log_probs: Tensor, others: Tensor) -> Tensor:
    """Of the first against the second."""
    return (others - log_probs).exp() - 1 - (others - log_probs)


def advantages(rewards: Tensor, values: Tensor) -> Tensor:
    """GAE as a sum over all later tokens, [T]."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    delta = rewards + GAMMA * following - values
    powers = (GAMMA * LAM) ** torch.arange(len(delta))
    return torch.stack([(powers[: len(delta) - t] * delta[t:]).sum() for t in range(len(delta))])


def actor_loss(new: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, worth: Tensor) -> tuple[Tensor, float]:
    """The mean over the tokens of one answer, and how many of them a clip decides."""
    ratio = (new - old).exp()
    held = torch.where(worth > 0, ratio.clamp(max=1 + HIGH), ratio.clamp(1 - LOW, DUAL))
    loss = -worth * held - ENTROPY * entropy + IN_LOSS * k3(new, ref)
    return loss.mean(), float((held != ratio).sum())


def critic_loss(new: Tensor, old: Tensor, goal: Tensor) -> Tensor:
    """The sum over the tokens of one answer."""
    near = old + (new - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.maximum((new - goal) ** 2, (near - goal) ** 2).sum()


def again(noted: list[tuple[Columns, list[list[int]]]], actor: Learner, critic: Learner) -> list[Numbers]:
    """Train both on the same rows; the metrics of each iteration."""
    coef, first, found = 0.2, dict(actor.model.state_dict()), list[Numbers]()
    reference = Learner(type(actor.model)(actor.model.config), first, norm=0)
    for rows, minis in noted:
        every = range(len(rows["scores"]))
        with torch.no_grad():
            old, ref = ([m.log_probs(rows, i)[0] for i in every] for m in (actor, reference))
            values = [critic.values(rows, i) for i in every]
        kl = [k3(mine, theirs) for mine, theirs in zip(old, ref, strict=True)]
        scores = [rows["scores"][i][rows["response_mask"][i]] for i in every]
        plain = [advantages(scores[i] - coef * kl[i], values[i]) for i in every]
        tokens = torch.cat(plain)
        worth = [(a - tokens.mean()) / tokens.std() for a in plain]
        divergence = float(torch.stack([k.mean() for k in kl]).mean())
        sums: list[Numbers] = []
        for mini in minis:
            count = sum(len(old[i]) for i in mini)
            losses = [critic_loss(critic.values(rows, i), values[i], plain[i] + values[i]) for i in mini]
            value_loss = torch.stack(losses).sum() / count
            parts = [actor_loss(*actor.log_probs(rows, i), old[i], ref[i], worth[i]) for i in mini]
            loss = torch.stack([part for part, _ in parts]).mean()
            numbers = {"actor/loss": loss.item(), "critic/loss": value_loss.item()}
            numbers["actor/clip_fraction"] = sum(clipped for _, clipped in parts) / count
            for name, learner, its in (("actor", actor, loss), ("critic", critic, value_loss)):
                numbers |= {f"{name}/{key}": value for key, value in learner.step(its).items()}
            sums.append(numbers)
        means = {name: sum(n[name] for n in sums) / len(sums) for name in sums[0] if not name.endswith("/lr")}
        found.append({**sums[-1], **means, "actor/kl": divergence, "actor/kl_coef": coef})
        coef *= 1 + max(-0.2, min(0.2, divergence / TARGET - 1)) * len(every) / HORIZON
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_the_equations_give_the_same_weights(name: str, model: str) -> None:
    ours = algorithm(model)
    data = TaskData(batch_size=9, num_rows=4 * 9, num_val_rows=0)
    kept = run(ours, data, steps=STEPS, settings=SETTINGS[name])
    config = AutoConfig.from_pretrained(model, num_labels=1)
    kinds = {"actor": AutoModelForCausalLM, "critic": AutoModelForSequenceClassification}
    learners = {n: Learner(k.from_config(config), kept.fresh[n], NORMS[n]) for n, k in kinds.items()}
    numbers = again(ours.noted, **learners)
    lengths = {int(n) for rows, _ in ours.noted for n in rows["response_mask"].sum(dim=1)}
    assert {1, 6} < lengths  # of one token, and cut off
    for mine, theirs in zip(numbers, kept.numbers, strict=True):
        assert mine == pytest.approx({key: theirs[key] for key in mine}, rel=2e-5, abs=2e-6)
    assert all(0 < n["actor/clip_fraction"] < 1 for n in numbers)
    assert all(n["actor/grad_norm"] > NORMS["actor"] for n in numbers)
    assert not math.isclose(numbers[1]["actor/kl_coef"], numbers[2]["actor/kl_coef"])
    for role, learner in learners.items():
        state = learner.model.state_dict()
        assert max(float((state[n] - w).abs().max()) for n, w in kept.weights[role].items()) < 1e-5, role
