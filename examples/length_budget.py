"""An algorithm from scratch: the best answers within a mean length of your choice.

    python examples/length_budget.py --steps 20
    rlhf fit --algo examples.length_budget.LengthBudget --algo.budget 5 --strategy colocated

REINFORCE with the mean of the other answers as the baseline. A token costs `price`, which rises while answers
are longer than the budget on average, and falls while they are shorter.
"""

from __future__ import annotations

import argparse
from dataclasses import field

import lightning.pytorch as pl
import torch

from rlhf_lightning import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import PolicyLoss, leave_one_out, masked_sum, spread
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward


class LengthBudget(RLHFAlgorithm):
    """Every field is an option; a field that holds a role is a model that the strategy places."""

    progress = ("reward/mean", "length/price")

    actor: Actor = field(default_factory=Actor)
    """Answers, and learns."""
    reward: Reward = field(default_factory=Reward)
    """Scores the answers; the name `reward` also means that held-out answers are scored with it."""
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    """The actor's loss."""
    group_size: int = 4
    """Answers to each prompt."""
    budget: float = 6.0
    """Mean length to stay within, tokens."""
    speed: float = 0.001
    """How much the price of a token rises for each token above the budget."""

    def __post_init__(self) -> None:
        """Checkpoints hold buffers, and so the price."""
        self.register_buffer("price", torch.zeros(()))

    def step(self, batch: Batch) -> Metrics:
        """One iteration: plain code on the controller, each call on all devices of its model."""
        batch = self.answers_to(batch, self.group_size)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reward.compute_reward(batch)
        batch, metrics = self.compute_advantage(batch)
        return metrics | self.actor.update_actor(batch, loss=self.policy_loss)

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add `advantages` [B, R] float32; reading a column waits for it and fetches it."""
        mask = batch["response_mask"]
        scores = masked_sum(batch["scores"], mask, dim=1)
        lengths, price = mask.sum(dim=1).float(), self.get_buffer("price")
        groups = torch.arange(len(batch)) // self.group_size
        worth = leave_one_out(scores - price * lengths, groups, valid=mask.any(dim=1))
        price += self.speed * (lengths.mean() - self.budget)
        price.clamp_(min=0)
        numbers = {
            "reward/mean": float(scores.mean()),
            "length/mean": float(lengths.mean()),
            "length/price": float(price),
        }
        return batch | {"advantages": spread(worth, mask)}, Metrics.of(numbers)


def main() -> None:
    """Train the embedded model in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs")
    options = parser.parse_args()
    actor = Actor(optimizer=OptimizerSpec(lr=2e-4), sampling=Sampling(max_new_tokens=8))
    trainer = pl.Trainer(
        strategy=Local(),  # or Colocated(devices=8), HybridEngine3D(...): the algorithm does not change
        accelerator="cpu",
        max_steps=options.steps,
        default_root_dir=options.out,
        log_every_n_steps=1,
    )
    trainer.fit(LengthBudget(actor=actor), datamodule=TaskData(batch_size=32))


if __name__ == "__main__":
    main()
