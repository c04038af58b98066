"""Whole iterations of our PPO, GRPO, ReMax and Safe-RLHF on the benchmark's workload: `Trainer.fit`.

Prints the seconds and tokens of the iterations, the seconds of each remote method (the slowest device's
median) and, to compare the updates with, of one forward and backward pass of plain transformers over the
tokens of a fixed iteration.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import lightning.pytorch as pl
import torch
from iterations import Measured, Run, Stopwatch, from_command_line
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from transformers import LlamaForCausalLM
from workload import (
    LEARNING_RATE,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    SAMPLES_PER_PROMPT,
    SEQUENCES,
    VOCABULARY,
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
    """Without a reference unless `run.kl` is given."""
    loss = PolicyLoss(aggregation="seq-mean-token-mean", kl_coef=run.kl or 0.0)
    return GRPO(actor=actor, reward=scores, policy_loss=loss, group_size=SAMPLES_PER_PROMPT)


def ppo(run: Run, actor: Actor, scores: Reward) -> PPO:
    """With a reference and KL in the reward."""
    penalty = KLPenalty(coef=0.05 if run.kl is None else run.kl)
    return PPO(actor=actor, critic=Critic(optimizer=actor.optimizer), reward=scores, kl=penalty)


def remax(run: Run, actor: Actor, scores: Reward) -> ReMax:
    """With a reference and KL in the reward."""
    return ReMax(actor=actor, reward=scores, reward_kl_coef=0.05 if run.kl is None else run.kl)


def saferlhf(run: Run, actor: Actor, scores: Reward) -> SafeRLHF:
    """With two critics, a reference and KL in the reward; the rule is the cost, too."""
    critic, penalty = Critic(optimizer=actor.optimizer), KLPenalty(coef=0.05 if run.kl is None else run.kl)
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
    beside = {"plain_s": plain_s(run)} if run.lengths == "fixed" else {}
    return laps.watch.measured(run, methods_s=methods_s, **beside)


def plain_s(run: Run, *, micro_batches: int = 4) -> float:
    """Seconds of one pass of plain transformers, forward and back, over an iteration's tokens, all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = LlamaForCausalLM.from_pretrained(run.workload.model, dtype=run.dtype)
    ids = torch.randint(VOCABULARY, (SEQUENCES, PROMPT_TOKENS + RESPONSE_TOKENS))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for part in ids.chunk(micro_batches):
            logits = model(part, use_cache=False, logits_to_keep=RESPONSE_TOKENS + 1).logits[:, :-1]
            log_probs = logits.log_softmax(-1).gather(-1, part[:, PROMPT_TOKENS:, None])
            log_probs.mean().backward()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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
