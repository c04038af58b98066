"""Whole iterations of our PPO, GRPO, ReMax and Safe-RLHF on the benchmark's workload: `Trainer.fit`.

Prints the seconds and tokens of the iterations, and the seconds of each remote method (the slowest device's
median).
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping

import lightning.pytorch as pl
from iterations import Measured, Run, Stopwatch, from_command_line
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from workload import (
    KL,
    LEARNING_RATE,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    SAMPLES_PER_PROMPT,
    SEQUENCES,
    reward,
    samples_per_prompt,
)

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO, PPO, ReMax, SafeRLHF
from rlhf_lightning.controller import Batch
from rlhf_lightning.data import PromptData
from rlhf_lightning.engines import FSDP, Native
from rlhf_lightning.functional import PolicyLoss
from rlhf_lightning.running import KLPenalty
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Colocated
from rlhf_lightning.workers import Actor, Cost, Critic, Reward, Settings


def rule(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """The workload's reward as a reward function; workers find it by its dotted path, on PYTHONPATH."""
    del prompts, rows
    return reward(responses)


class Laps(Callback):
    """Notes the end and the tokens of every iteration, and how long its remote methods took."""

    def __init__(self) -> None:
        """Start with nothing noted."""
        self.watch = Stopwatch()
        self.methods_s: defaultdict[str, list[float]] = defaultdict(list)
        self.row_tokens: list[int] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the lengths of responses where the algorithm looks at them."""
        assert isinstance(pl_module, RLHFAlgorithm)
        look = pl_module.rollout_metrics

        def looked(batch: Batch) -> dict[str, float]:
            self.row_tokens = batch["row_tokens"].tolist()
            return look(batch)

        pl_module.rollout_metrics = looked  # type: ignore[method-assign]

    def on_train_batch_end(  # type: ignore[override]
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: Mapping[str, object],
        *_: object,
    ) -> None:
        """An iteration ended."""
        mask = batch["prompt_mask"]
        assert isinstance(mask, Tensor)
        self.watch.note(int(mask.sum()) * len(self.row_tokens) // len(mask), self.row_tokens)
        self.watch.lap()
        for name, value in trainer.callback_metrics.items():
            if name.startswith("time/"):
                self.methods_s[name.removeprefix("time/").removesuffix("_s")].append(float(value))


def grpo(run: Run, actor: Actor, scores: Reward) -> GRPO:
    """Without a reference, as TRL's by default."""
    loss = PolicyLoss(aggregation="seq-mean-token-mean")
    return GRPO(actor=actor, reward=scores, policy_loss=loss, group_size=SAMPLES_PER_PROMPT)


def ppo(run: Run, actor: Actor, scores: Reward) -> PPO:
    """With a reference and KL in the reward."""
    penalty = KLPenalty(coef=KL)
    return PPO(actor=actor, critic=Critic(optimizer=actor.optimizer), reward=scores, kl=penalty)


def remax(run: Run, actor: Actor, scores: Reward) -> ReMax:
    """With a reference and KL in the reward."""
    return ReMax(actor=actor, reward=scores, reward_kl_coef=KL)


def saferlhf(run: Run, actor: Actor, scores: Reward) -> SafeRLHF:
    """With two critics, a reference and KL in the reward; the rule is the cost, too."""
    critic, penalty = Critic(optimizer=actor.optimizer), KLPenalty(coef=KL)
    cost = Cost(functions=scores.functions)
    return SafeRLHF(actor=actor, critic=critic, cost_critic=critic, reward=scores, cost=cost, kl=penalty)


COPIES = Settings(
    train=FSDP(shard=1, kept_tokens=SEQUENCES * (PROMPT_TOKENS + RESPONSE_TOKENS)),
    generate=Native(cache_dtype="float32"),
)
"""Each device has all weights, as with TRL; critics learn from the passes that evaluated."""
KINDS: Mapping[str, Callable[[Run, Actor, Reward], RLHFAlgorithm]] = {
    "grpo": grpo,
    "ppo": ppo,
    "remax": remax,
    "saferlhf": saferlhf,
}


def algorithm(run: Run) -> RLHFAlgorithm:
    """With the settings of the peers: one epoch, one update an iteration."""
    actor = Actor(
        path=str(run.workload.model),
        dtype=run.dtype,
        optimizer=OptimizerSpec(lr=LEARNING_RATE),
        sampling=Sampling(max_new_tokens=RESPONSE_TOKENS),
        seed=run.seed,
    )
    return KINDS[run.algo](run, actor, Reward(functions="ours_throughput.rule"))


def prompts(run: Run) -> PromptData:
    """In an order of its seed."""
    number = SEQUENCES // samples_per_prompt(run.algo)
    return PromptData(path=str(run.workload.prompts), batch_size=number, seed=run.seed)


def measure(run: Run) -> Measured:
    """Train `run.warmup + run.iterations` iterations of `run.algo`; the later ones, and seconds by method.

    The settings are those of the peers: 1 epoch, 1 update an iteration, AdamW, temperature 1, 64 sequences
    (GRPO 8 prompts x 8 samples, the others 64 prompts x 1), `workload.reward`, `run.processes` devices.
    """
    laps = Laps()
    trainer = pl.Trainer(
        strategy=Colocated(devices=run.processes, settings=COPIES),
        accelerator="cpu",
        max_steps=run.warmup + run.iterations,
        callbacks=[laps],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=run.workload.model.parent / "ours",
    )
    trainer.fit(algorithm(run), datamodule=prompts(run))
    methods_s = {name: statistics.median(each[run.warmup :]) for name, each in laps.methods_s.items()}
    return laps.watch.measured(run, methods_s=methods_s)


def main() -> None:
    """Measure and print.

    Raises:
        RuntimeError: the iterations are not those of the workload.
    """
    run = from_command_line()
    found = measure(run)
    found.check(run)
    print(found.as_json())


if __name__ == "__main__":
    main()
