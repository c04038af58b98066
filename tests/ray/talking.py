"""Runs in which an environment speaks between the turns of the actor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import PromptData
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Reward
from tests.unit.algos.short import trainer
from tests.unit.algos.small import write_rows

ENDS = tuple(range(60))
"""Tokens that end a turn."""
STEPS = 3


def speaks(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str | None]:
    """Replies as often as a row says, and notes each row that it is asked about."""
    del prompts
    replies: list[str | None] = []
    for said, row in zip(responses, rows, strict=True):
        with Path(str(row["log"])).open("a") as log:
            log.write(f"{row['number']}\n")
        more = said.count("<user>") < int(str(row["replies"]))
        replies.append(f"<user>{row['number']}<assistant>" if more else None)
    return replies


class Kept(GRPO):
    """Keeps what it has learned from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batches: list[Batch] = []

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        names = (
            "row_ids",
            "response_ids",
            "response_mask",
            "log_probs",
            "rollout_log_probs",
            "row_truncated",
            "row_turns",
        )
        self.batches.append(Batch.of(batch.select(names).fetch()))
        return super().compute_advantage(batch)


def gaps(batch: Batch) -> list[int]:
    """How often the environment spoke in each response."""
    found: list[int] = (batch["response_mask"].int().diff(dim=1) > 0).sum(1).tolist()
    return found


def learn(
    strategy: Strategy,
    model: Path,
    directory: Path,
    *,
    recompute_log_probs: bool = False,
    callbacks: Sequence[Callback] = (),
) -> tuple[list[Batch], list[str]]:
    """What was learned from, and which rows the environment was asked about, in order of their numbers."""
    log = directory / "asked.txt"
    directory.mkdir(exist_ok=True)
    rows: list[dict[str, object]] = [
        {"prompt": "go on " + "a" * n, "number": n, "replies": (0, 0, 1, 2)[n % 4], "log": str(log)}
        for n in range(12)
    ]
    algorithm = Kept(
        actor=Actor(
            path=str(model),
            optimizer=OptimizerSpec(lr=1e-4),
            sampling=Sampling(max_new_tokens=30, stop_token_ids=ENDS),
            environment=Environment(function=speaks),
            recompute_log_probs=recompute_log_probs,
        ),
        reward=Reward(functions={"length": 1.0}),
        group_size=2,
    )
    path = write_rows(directory / "prompts.jsonl", rows)
    run = trainer(strategy, directory, steps=STEPS, callbacks=[*callbacks])
    run.fit(algorithm, datamodule=PromptData(path=path, batch_size=4, val_rows=0, shuffle=False))
    return algorithm.batches, sorted(log.read_text().split())
