"""On-policy distillation: a student learns from what a teacher says of the tokens that the student draws.

    python examples/distillation.py --steps 60
    rlhf fit --algo examples.distillation.Distillation --algo.teacher.path DIRECTORY --strategy colocated

The loss is the reverse KL of the said tokens (Gu 2023, MiniLLM, arXiv 2306.08543); `--algo distillation`
compares the teacher's likeliest words in each place. The first command makes its teacher: the embedded model,
which sees more sorted digits. The second takes any model with the student's tokenizer.
"""

from __future__ import annotations

import argparse
from dataclasses import field
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback

from rlhf_lightning import RLHFAlgorithm
from rlhf_lightning.algos import SFT
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import PolicyLoss, masked_mean
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reference, Reward


class Distillation(RLHFAlgorithm):
    """Nothing is scored in training: the teacher says all."""

    progress = ("distillation/reverse_kl",)

    actor: Actor = field(default_factory=Actor)
    """The student."""
    teacher: Reference = field(default_factory=Reference)
    """Reads what the student has drawn; a reference is any frozen model, of a path of its own."""
    reward: Reward = field(default_factory=Reward)
    """Scores held-out answers."""
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    """The student's loss."""

    def setup(self, stage: str) -> None:
        """As for every algorithm; a reference without a path would be the student as it began."""
        if not self.teacher.path:
            raise ValueError("Distillation has no teacher. Type --algo.teacher.path DIRECTORY.")
        super().setup(stage)

    def step(self, batch: Batch) -> Metrics:
        """A token is worth the more, the likelier the teacher finds it than the student did."""
        batch |= self.actor.generate_sequences(batch)
        batch |= self.teacher.compute_ref_log_prob(batch)
        apart = batch["log_probs"] - batch["ref_log_probs"]
        kl = float(masked_mean(apart, batch["response_mask"]))
        metrics = Metrics.of(self.rollout_metrics(batch) | {"distillation/reverse_kl": kl})
        return metrics | self.actor.update_actor(batch | {"advantages": -apart}, loss=self.policy_loss)


def fit(algorithm: RLHFAlgorithm, out: Path, steps: int, *callbacks: pl.Callback) -> None:
    """Train in this process, with a validation at the end."""
    trainer = pl.Trainer(
        strategy=Local(),
        accelerator="cpu",
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,  # counted over all epochs
        log_every_n_steps=1,
        default_root_dir=out,
        callbacks=list(callbacks),
    )
    trainer.fit(algorithm, datamodule=TaskData(batch_size=64, completions=isinstance(algorithm, SFT)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    options = parser.parse_args()
    directory = options.out / "teacher"
    actor = Actor(optimizer=OptimizerSpec(lr=2e-4), sampling=Sampling(max_new_tokens=8))
    sft = SFT(actor=actor)
    export = LambdaCallback(on_train_end=lambda *_: sft.actor.export(directory=directory).fetch())
    fit(sft, options.out / "sft", 2 * options.steps, export)
    student = Distillation(actor=actor, teacher=Reference(path=str(directory)))
    fit(student, options.out, options.steps)
