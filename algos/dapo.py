"""DAPO: GRPO with a wider upper clip, dynamic sampling, and a penalty on overlong answers (Yu 2025)."""

from __future__ import annotations

from dataclasses import field, replace

import torch

from rlhf_lightning.algos.grpo import GRPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import GroupEstimator, Overlong, PolicyLoss, varied_groups


def dapo_loss() -> PolicyLoss:
    """The surrogate clipped at 0.8 and 1.28, a mean over all tokens, without KL (Yu 2025 eq. 8)."""
    return PolicyLoss(clip_low=0.2, clip_high=0.28)


class DAPO(GRPO):
    """Yu 2025 eq. 8 to 13; where answers score alike, the paper draws other prompts, this other answers."""

    policy_loss: PolicyLoss = field(default_factory=dapo_loss)
    """The actor's loss."""
    rounds: int = 2
    """Times that a prompt is answered at most, until its scores differ; the rest is dropped."""
    overlong: Overlong | None = None
    """Penalty on answers near the limit of length."""

    def __post_init__(self) -> None:
        """Refuse no rounds at all, and a penalty that begins before the answer.

        Raises:
            ValueError: as said.
        """
        super().__post_init__()
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds}: prompts are answered at least once. Try 2.")
        self.draws_again = self.rounds > 1
        if self.overlong is not None:
            self.overlong.penalty(torch.zeros(1), max_tokens=self.main_actor.sampling.max_new_tokens)

    def step(self, batch: Batch) -> Metrics:
        """One iteration."""
        batch, metrics = self.sample(batch)
        if not len(batch):
            return metrics
        if self.policy_loss.kl_coef or self.reward_kl_coef:
            batch |= self.reference.compute_ref_log_prob(batch)
        batch, found = self.compute_advantage(batch)
        metrics |= found
        for mini in self.mini_batches(batch, size=self.mini_batch_size, epochs=self.epochs):
            metrics |= self.actor.update_actor(mini, loss=self.policy_loss)
        return metrics

    def sample(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Groups of scored answers, those whose scores are all the same drawn again, then dropped."""
        kept, prompts, means = [], batch, []
        for number in range(self.rounds):
            answers = self.answers_to(prompts, self.group_size, draw=number)
            answers |= self.actor.generate_sequences(answers)
            answers |= self.reward.compute_reward(answers)
            scores = answers["scores"].sum(dim=1)
            varied = varied_groups(scores, self.group_size)
            kept.append(answers.take(varied.repeat_interleave(self.group_size).nonzero()[:, 0].numpy()))
            means.append(float(scores.mean()))
            prompts = prompts.take((~varied).nonzero()[:, 0].numpy())
            if not len(prompts):
                break
        found = {
            "reward/drawn": means[0],
            "response/rounds": float(len(kept)),
            "response/dropped_prompts": len(prompts) / len(batch),
        }
        return Batch.joined(kept), Metrics.of(found)

    def estimator(self) -> GroupEstimator:
        """What makes the advantages of a batch of groups."""
        return replace(super().estimator(), overlong=self.overlong)
