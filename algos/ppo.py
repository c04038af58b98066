"""PPO: proximal policy optimisation with a critic and KL-penalised rewards (Ziegler 2019, Ouyang 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from itertools import cycle

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.balance import balanced
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data_checks import NO_PTX
from rlhf_lightning.functional import Estimator, GAEEstimator, PolicyLoss, SFTLoss, ValueLoss
from rlhf_lightning.running import KLPenalty, Running, Scaling, drifted
from rlhf_lightning.workers import Actor, Critic, Reference, Reward


class PPO(RLHFAlgorithm):
    """HybridFlow Figure 6, left."""

    actor: Actor = field(default_factory=Actor)
    """Answers, and learns to answer better."""
    critic: Critic = field(default_factory=Critic)
    """Estimates the reward still to come; its `path` may be that of a reward model."""
    reference: Reference = field(default_factory=Reference)
    """What the actor is kept close to."""
    reward: Reward = field(default_factory=Reward)
    """Scores the answers."""
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    """The actor's loss."""
    value_loss: ValueLoss = field(default_factory=ValueLoss)
    """The critic's loss."""
    ptx_loss: SFTLoss = field(default_factory=lambda: SFTLoss(coef=0.0))
    """A loss on pre-training text (MixedData) in the actor's steps; none where its coef is 0."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Lambda of GAE: 0 takes one-step advantages, 1 whole returns."""
    whiten: bool = True
    """Give the advantages of the whole batch mean 0 and variance 1."""
    kl: KLPenalty = field(default_factory=KLPenalty)
    """The KL penalty in the reward."""
    scaling: Scaling = field(default_factory=Scaling)
    """Normalisation of scores and values by running statistics."""
    stop_kl: float | None = None
    """Pause the actor for the rest of an iteration once actor/approx_kl is above this, nats per token."""
    epochs: int = 1
    """Passes over each batch."""
    mini_batch_size: int = 0
    """Rows per optimizer step; 0 is the whole batch."""
    critic_warmup_steps: int = 0
    """Iterations at the start in which only the critic learns."""

    def __post_init__(self) -> None:
        """Refuse impossible options, and register the state that checkpoints keep."""
        GAEEstimator(gamma=self.gamma, lam=self.lam)  # refuses what is outside [0, 1]
        self.running = Running(self.kl, self.scaling)
        self.actor_paused = False
        self.ptx_batches: Iterator[Batch] = iter(())

    def step(self, batch: Batch) -> Metrics:
        """One iteration."""
        batch |= self.actor.generate_sequences(batch)
        batch |= self.critic.compute_values(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.reward.compute_reward(batch)
        batch, metrics = self.compute_advantage(batch)
        for mini in self.mini_batches(batch, size=self.mini_batch_size, epochs=self.epochs):
            metrics |= self.critic.update_critic(mini, loss=self.value_loss)
            metrics |= self.update_actor(mini)
        return metrics

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add `rewards`, `advantages` and `returns`, [B, R] float32."""
        batch = self.estimate(batch, self.estimator(batch))
        metrics = self.rollout_metrics(batch) | {"actor/kl_coef": self.running.coef}
        if self.trainer.training:
            moves = self.global_step >= self.critic_warmup_steps  # else no divergence is the actor's doing
            self.running.learn(batch, kl=metrics.get("actor/kl") if moves else None)
        return batch, Metrics.of(metrics)

    def estimator(self, batch: Batch) -> Estimator:
        """What makes the advantages of a batch."""
        estimator = GAEEstimator(gamma=self.gamma, lam=self.lam, whiten=self.whiten)
        return self.running.fitted(estimator, batch, learn=self.trainer.training)

    def mini_batches(self, batch: Batch, *, size: int, epochs: int = 1, together: int = 1) -> Iterator[Batch]:
        """See `RLHFAlgorithm.mini_batches`; also resets what `update_actor` carries between mini-batches."""
        self.actor_paused = self.global_step < self.critic_warmup_steps
        self.ptx_batches = self.split_ptx(steps=-(-batch.num_groups(together) // (size or len(batch) or 1)))
        return super().mini_batches(batch, size=size, epochs=epochs, together=together)

    def update_actor(self, mini: Batch) -> Metrics:
        """One optimizer step of the actor, unless it is paused."""
        if self.actor_paused:
            return Metrics()
        ptx = Metrics()
        if self.ptx_loss.coef:
            ptx = self.actor.accumulate_actor(next(self.ptx_batches), loss=self.ptx_loss, temperature=1.0)
        metrics = ptx.moved("sft", to="ptx") | self.actor.update_actor(mini, loss=self.policy_loss)
        self.actor_paused = drifted(metrics, self.stop_kl, mini)
        return metrics

    def split_ptx(self, *, steps: int) -> Iterator[Batch]:
        """The pre-training rows, divided among the optimizer steps of an epoch, again in each epoch.

        Raises:
            ValueError: the batch came without any, from loaders that no check knows.
        """
        if not self.ptx_loss.coef or not self.trainer.training:
            return iter(())
        if self.ptx_batch is None:
            raise ValueError(NO_PTX)
        return cycle([balanced(part) for part in self.ptx_batch.split(min(steps, len(self.ptx_batch)))])

    def explain(self, batch: Batch) -> Batch:
        """Add per-token divergence, values and advantages."""
        batch |= self.actor.compute_log_prob(batch)  # greedy answers have those of temperature 0
        batch |= self.critic.compute_values(batch) | self.reference.compute_ref_log_prob(batch)
        return self.compute_advantage(batch)[0]
