r"""Responses of several turns: an actor that sorts wrongly is told so, and may try again.

    python examples/second_try.py --steps 20
    rlhf fit --algo grpo --algo.actor.environment.function examples.second_try.told \
        --algo.actor.sampling.max_new_tokens 64 --algo.reward.functions examples.second_try.last_try

An environment is a function of what was said so far. Its replies are context: nothing is learned from them.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl

from rlhf_lightning.algos import GRPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward

END = "<eos>"


def tried(response: str) -> str:
    """The last thing that the actor has said."""
    return response.rpartition(": ")[2].removesuffix(END)


def told(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str | None]:
    """Repeat the task where the last answer is wrong, and end the response where it is right."""
    right = [tried(response) == row["answer"] for response, row in zip(responses, rows, strict=True)]
    return [None if done else f" No. {prompt}" for prompt, done in zip(prompts, right, strict=True)]


def last_try(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """1 for a right last answer, less a quarter for each try before it."""
    del prompts
    right = [tried(response) == row["answer"] for response, row in zip(responses, rows, strict=True)]
    tries = [response.count(" No. ") for response in responses]
    return [max(0.0, 1 - 0.25 * before) * done for before, done in zip(tries, right, strict=True)]


def main() -> None:
    """Train the embedded model in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs")
    options = parser.parse_args()
    actor = Actor(
        optimizer=OptimizerSpec(lr=2e-4),
        sampling=Sampling(max_new_tokens=64),
        environment=Environment(function="examples.second_try.told", turns=3),
    )
    trainer = pl.Trainer(
        strategy=Local(),
        accelerator="cpu",
        max_steps=options.steps,
        default_root_dir=options.out,
        log_every_n_steps=1,
    )
    algorithm = GRPO(actor=actor, reward=Reward(functions="examples.second_try.last_try"))
    trainer.fit(algorithm, datamodule=TaskData(batch_size=16))


if __name__ == "__main__":
    main()
