"""The runs of learning.py: the settings of every online algorithm, and one of them with one seed.

All sort digits with the embedded model, 128 answers an iteration, exact answers rewarded. SafeRLHF and the
PPO beside it are rewarded for length as well; to be too long is the cost. ReMax, CISPO, SAPO and OnlineDPO,
whose comparisons say little and whose steps no clip holds back, learn from more answers at a time.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks.small_runs import quiet_trainer
from rlhf_lightning import algos
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import DPOLoss, Estimator, PolicyLoss, SAPOLoss
from rlhf_lightning.rewards.functions import too_long
from rlhf_lightning.running import KLPenalty
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Cost, Critic, Reference, Reward

ANSWERS = 128
GROUP = 4
HELD_OUT = 1024
THRESHOLD = 0.1
"""Share of answers that may be longer than the right one."""
TEMPTING = Reward(functions={"exact_match": 1.0, "length": 64.0})
"""A right answer of 6 digits earns 2.5, a wrong one of 8 earns 2."""


def actor() -> Actor:
    return Actor(optimizer=OptimizerSpec(lr=2e-4, warmup_steps=5), sampling=Sampling(max_new_tokens=8))


def critic() -> Critic:
    return Critic(optimizer=OptimizerSpec(lr=1e-3))


def with_critic(kind: type[RLHFAlgorithm], **options: object) -> Callable[[], RLHFAlgorithm]:
    """PPO and its like, as in configs/embedded.yaml."""
    shared = {"mini_batch_size": 64, "critic_warmup_steps": 3, "kl": KLPenalty(coef=0.003)}
    return lambda: kind(actor=actor(), critic=critic(), **shared, **options)


def without(kind: type[RLHFAlgorithm], *, mini: int = 64, **options: object) -> Callable[[], RLHFAlgorithm]:
    """The algorithms without a critic; two optimizer steps an iteration where a clip holds the second."""
    return lambda: kind(actor=actor(), mini_batch_size=mini, **options)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An algorithm of the benchmark."""

    make: Callable[[], RLHFAlgorithm]
    answers: int = GROUP
    """Answers to each prompt."""
    batch: int = ANSWERS
    """Answers of an iteration."""
    steps: int = 25
    """Iterations."""


def safe() -> RLHFAlgorithm:
    """PPO with a limit on the cost."""
    make = with_critic(
        algos.SafeRLHF,
        reward=TEMPTING,
        cost=Cost(functions="too_long"),
        cost_critic=critic(),
        threshold=THRESHOLD,
        whiten=True,
    )
    return make()


ENTRIES: Mapping[str, Entry] = {
    "PPO": Entry(make=with_critic(algos.PPO), answers=1),
    "ReMax": Entry(
        make=without(algos.ReMax, mini=0, reward_kl_coef=0.003), answers=1, batch=4 * ANSWERS, steps=35
    ),
    "SafeRLHF": Entry(make=safe, answers=1, steps=50),
    "PPO without a limit": Entry(make=with_critic(algos.PPO, reward=TEMPTING), answers=1),
    "GRPO": Entry(make=without(algos.GRPO)),
    "Dr.GRPO": Entry(
        make=without(
            algos.GRPO,
            scale="none",
            policy_loss=PolicyLoss(aggregation="seq-mean-token-sum-norm", horizon=8),
        )
    ),
    "SAPO": Entry(make=without(algos.GRPO, mini=0, policy_loss=SAPOLoss()), batch=2 * ANSWERS),
    "RLOO": Entry(make=without(algos.RLOO, reward_kl_coef=0.003)),
    "REINFORCE++": Entry(make=without(algos.ReinforcePP, reward_kl_coef=0.003), answers=1),
    "REINFORCE++ baseline": Entry(
        make=without(algos.ReinforcePP, reward_kl_coef=0.003, group_size=GROUP), steps=40
    ),
    "DAPO": Entry(make=without(algos.DAPO)),
    "GSPO": Entry(make=without(algos.GSPO)),
    "GMPO": Entry(make=without(algos.GMPO)),
    "CISPO": Entry(make=without(algos.CISPO, mini=0), batch=2 * ANSWERS),
    "OPO": Entry(make=without(algos.OPO, mini=0)),
    "OnlineDPO": Entry(
        make=without(algos.OnlineDPO, mini=0, loss=DPOLoss(beta=0.5)), answers=2, batch=2 * ANSWERS
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One algorithm, one seed."""

    name: str
    seed: int
    fault: str = ""
    """What is broken on purpose in the advantages; nothing where empty."""


@dataclass
class Result:
    """What came out of a run."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of each iteration."""
    costs: list[float] = field(default_factory=list)
    """Mean cost of each iteration, where it is counted."""
    multipliers: list[float] = field(default_factory=list)
    final_reward: float = 0.0
    """Mean reward of sampled answers to held-out prompts after the last iteration."""
    final_cost: float = 0.0
    start_reward: float = 0.0
    """The same before the first one."""
    kl: float = 0.0
    """Divergence from the reference after the last iteration, nats per answer."""


class Watch(pl.Callback):
    """Notes the curves, and measures before and after."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the start."""
        assert isinstance(pl_module, RLHFAlgorithm)
        self.result.start_reward = held_out(pl_module)[0]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Note the numbers of an iteration."""
        logged = trainer.logged_metrics
        drawn = "reward/drawn" if "reward/drawn" in logged else "reward/mean"
        self.result.rewards.append(float(logged[drawn]))
        if "cost/mean" in logged:
            self.result.costs.append(float(logged["cost/mean"]))
            self.result.multipliers.append(float(logged["cost/multiplier"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the end."""
        assert isinstance(pl_module, RLHFAlgorithm)
        self.result.final_reward, self.result.final_cost, self.result.kl = held_out(pl_module)


def held_out(algorithm: RLHFAlgorithm) -> tuple[float, float, float]:
    """Mean reward, cost and divergence in nats per answer, of sampled answers to held-out prompts."""
    data = algorithm.trainer.datamodule  # type: ignore[attr-defined]
    rows = Batch.joined([Batch.of(columns) for columns in data.val_dataloader()[0]])
    rows |= algorithm.main_actor.generate_sequences(rows)
    roles = algorithm.roles()
    reference = roles["reference"]
    assert isinstance(reference, Reference)
    rows |= reference.compute_ref_log_prob(rows)
    rows |= roles["reward"].compute_reward(rows)  # type: ignore[attr-defined]
    texts = algorithm.tokenizer.batch_decode(
        [ids[mask].tolist() for ids, mask in zip(rows["response_ids"], rows["response_mask"], strict=True)],
        skip_special_tokens=True,
    )
    difference: Tensor = (rows["log_probs"] - rows["ref_log_probs"]) * rows["response_mask"]
    costs = too_long([], texts, cast("list[dict[str, object]]", rows.objects("rows")))
    return float(rows["scores"].sum(1).mean()), sum(costs) / len(costs), float(difference.sum(1).mean())


def broken(estimate: Callable[[Batch, Estimator], Batch], fault: str) -> Callable[[Batch, Estimator], Batch]:
    """An algorithm's estimate with a fault in its advantages."""

    def wrong(batch: Batch, estimator: Estimator) -> Batch:
        found = estimate(batch, estimator)
        advantages, mask = found["advantages"], found["response_mask"]
        changed = {
            "sign": -advantages,
            "shift": advantages.roll(1, dims=0) * mask,
            "mask": torch.where(mask & (torch.arange(mask.shape[1]) < 1), advantages, 0.0),
        }[fault]
        return found | {"advantages": changed}

    return wrong


def play(run: Run) -> Result:
    """Train once, in this process."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(run.seed, verbose=False)
    entry = ENTRIES[run.name]
    algorithm = entry.make()
    algorithm.validates = ("reference",)  # `held_out` asks it, also where no step does
    if run.fault:
        algorithm.estimate = broken(algorithm.estimate, run.fault)  # type: ignore[assignment,method-assign]
    result = Result()
    trainer = quiet_trainer(Local(num_threads=1), ".", steps=entry.steps, callbacks=[Watch(result)])
    data = TaskData(
        batch_size=entry.batch // entry.answers,
        num_rows=entry.batch // entry.answers * entry.steps,
        num_val_rows=HELD_OUT,
    )
    trainer.fit(algorithm, datamodule=data)
    return result
