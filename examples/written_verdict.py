"""Two models that write: one answers, the other judges in words, and both learn.

    rlhf fit --algo examples.written_verdict.WrittenVerdict --strategy colocated

The judge reads a prompt with an answer to it and writes a verdict. The share of digits in the verdict,
which a small model can learn, stands for a grade. An answer earns its grade and the score of the field
`reward`; with the grade alone, actor and judge would soon agree on something meaningless. A verdict earns
more the nearer its grade is to that score.
"""

from __future__ import annotations

from dataclasses import field
from typing import cast

import torch
from torch import Tensor

from rlhf_lightning import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import PolicyLoss, group_advantages, masked_sum, spread
from rlhf_lightning.reporting import answers
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.workers import Actor, Reward, asking


class WrittenVerdict(RLHFAlgorithm):
    """GRPO twice an iteration; the two actors differ only in the names of their fields."""

    progress = ("reward/mean", "judge/error")

    actor: Actor = field(default_factory=Actor)
    """Answers the data's prompts, and held-out ones."""
    judge: Actor = field(
        default_factory=lambda: Actor(optimizer=OptimizerSpec(lr=2e-4), sampling=Sampling(max_new_tokens=4))
    )
    """Answers questions about answers; the embedded settings have a rate for the actor, and none for it."""
    reward: Reward = field(default_factory=Reward)
    """The truth."""
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    """Of both."""
    group_size: int = 4
    """Answers to each prompt."""

    def step(self, batch: Batch) -> Metrics:
        """Answer, judge, learn both."""
        batch = self.answers_to(batch, self.group_size)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reward.compute_reward(batch)
        asked = asking(batch, self.questions(batch), self.tokenizer)
        asked |= self.judge.generate_sequences(asked)
        grades = self.grades(asked)
        truth = masked_sum(batch["scores"], batch["response_mask"], dim=1)
        error = (grades - truth).abs()
        metrics = Metrics.of(self.rollout_metrics(batch) | {"judge/error": float(error.mean())})
        metrics |= self.actor.update_actor(self.worth(batch, truth + grades), loss=self.policy_loss)
        judged = self.judge.update_actor(self.worth(asked, -error), loss=self.policy_loss)
        return metrics | judged.moved("actor", to="judge")

    def questions(self, batch: Batch) -> list[str]:
        """What the judge reads: each prompt with its answer."""
        rows = cast("list[dict[str, object]]", batch.objects("rows"))
        said = zip(rows, answers(batch, self.tokenizer), strict=True)
        return [f"{row['prompt']}{answer} Grade: " for row, answer in said]

    def grades(self, asked: Batch) -> Tensor:
        """[B] float32 in [0, 1], out of the verdicts' texts."""
        verdicts = [str(text) for text in answers(asked, self.tokenizer)]
        return torch.tensor([sum(map(str.isdigit, text)) / max(1, len(text)) for text in verdicts])

    def worth(self, batch: Batch, numbers: Tensor) -> Batch:
        """The rows with `advantages` [B, R] float32: each one's number beside those of its group."""
        groups = torch.arange(len(batch)) // self.group_size
        return batch | {"advantages": spread(group_advantages(numbers, groups), batch["response_mask"])}
