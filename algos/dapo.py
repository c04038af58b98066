"""DAPO: GRPO with a wider upper clip, dynamic sampling, and a penalty on overlong answers (Yu 2025)."""

from __future__ import annotations

from dataclasses import field, replace
from typing import cast

import torch

from rlhf_lightning.algos.grpo import GRPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import row_data
from rlhf_lightning.functional import (
    GroupEstimator,
    Overlong,
    PolicyLoss,
    masked_sum,
    rollout_metrics,
    varied_groups,
)
from rlhf_lightning.waiting import Waited, WaitingGroups

HELD = "held_groups"
"""Key of a checkpoint: the groups that were not learned from yet."""


def dapo_loss() -> PolicyLoss:
    """The surrogate clipped at 0.8 and 1.28, a mean over all tokens, without KL (Yu 2025 eq. 8)."""
    return PolicyLoss(clip_low=0.2, clip_high=0.28)


class DAPO(GRPO):
    """Yu 2025 eq. 8 to 13: groups that teach are gathered until there is a batch of them to learn from."""

    policy_loss: PolicyLoss = field(default_factory=dapo_loss)
    """The actor's loss."""
    overlong: Overlong | None = None
    """Penalty on answers near the limit of length."""
    progress = ("reward/drawn",)

    def __post_init__(self) -> None:
        """Refuse an overlong penalty that would begin before the answer does."""
        super().__post_init__()
        self._held = WaitingGroups(size=self.group_size)
        if self.overlong is not None:
            self.overlong.penalty(torch.zeros(1), max_tokens=self.main_actor.sampling.max_new_tokens)

    def setup(self, stage: str) -> None:
        """As for every algorithm; the groups of an earlier run are of other weights, and none is held."""
        super().setup(stage)
        data = row_data(self.trainer)
        self._held = WaitingGroups(size=self.group_size, batch_rows=data.batch_rows if data else 0)

    def step(self, batch: Batch) -> Metrics:
        """One iteration, which learns if it makes a batch whole."""
        whole, numbers = self.gather(batch)
        if whole is None:
            return Metrics.of(numbers)
        if "reference" not in self.uncalled():
            whole |= self.reference.compute_ref_log_prob(whole)
        whole, found = self.compute_advantage(whole)
        metrics = Metrics.of({**found.fetch(), **numbers})
        for mini in self.mini_batches(whole, size=self.mini_batch_size, epochs=self.epochs):
            metrics |= self.actor.update_actor(mini, loss=self.policy_loss)
        return metrics

    def gather(self, batch: Batch) -> tuple[Batch | None, dict[str, float]]:
        """Answer prompts, and hold the groups whose scores differ until they are as many as a batch has."""
        answers = self.answers_to(batch, self.group_size)
        answers |= self.actor.generate_sequences(answers)
        answers |= self.reward.compute_reward(answers)
        scores = masked_sum(answers["scores"], answers["response_mask"], dim=1)
        varied = varied_groups(scores, self.group_size)
        held, whole = self._held.add(answers, varied)
        tied = float((~varied).float().mean())
        numbers = {
            "reward/drawn": float(scores.mean()),
            "response/dropped_prompts": tied,
            "response/tied_prompts": tied,
            "response/held_prompts": float(held),
            "prompt/tokens": float(answers["prompt_mask"].sum()),
            "response/samples_per_prompt": float(self.group_size),
        }
        lengths = answers["response_mask"].sum(dim=1)
        return whole, numbers | rollout_metrics(None, lengths, answers["row_truncated"])

    def estimator(self) -> GroupEstimator:
        """What makes the advantages of a batch of groups."""
        return replace(super().estimator(), overlong=self.overlong)

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Keep the groups that are held."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[HELD] = self._held.state()

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Hold the groups that were held, if the run is to learn from them.

        Raises:
            ValueError: they are of another size, or their answers of another width.
        """
        super().on_load_checkpoint(checkpoint)
        new_tokens = self.main_actor.sampling.max_new_tokens
        if self.trainer.state.fn == "fit" and HELD in checkpoint:
            self._held.restore(cast(Waited, checkpoint[HELD]), new_tokens=new_tokens)
