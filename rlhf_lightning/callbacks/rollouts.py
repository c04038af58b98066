"""The answers that a run learns from, as JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch
from rlhf_lightning.functional import masked_sum
from rlhf_lightning.output import check_output, leaves_files, output_path, put_aside, whole
from rlhf_lightning.reporting import part_names, texts
from rlhf_lightning.rewards import json_safe
from rlhf_lightning.trainer_habits import begins_anew


class Rollouts(Callback):
    """Write the prompts, responses and scores of iterations, a line each: what the reward makes of a policy.

    A line has `step`, `row_id`, `prompt`, `response`, `score`, and `scores` by reward function where several
    score (null where one does not apply). It is of the rows that the algorithm describes by
    `rollout_metrics`, as all online algorithms here do.

    Raises:
        ValueError: fewer than one row or iteration is asked for.
    """

    def __init__(self, rows: int = 0, *, every_n_steps: int = 1, directory: str | None = None) -> None:
        """Say how much to write.

        Args:
            rows: most rows of an iteration, the first; 0 writes all.
            every_n_steps: iterations from one that is written to the next; where such an iteration has no
                answers to learn from, as with DAPO, the first one after it that has is written.
            directory: of the files; None is `rollouts` under the trainer's `default_root_dir`.
        """
        super().__init__()
        if rows < 0 or every_n_steps < 1:
            raise ValueError(
                f"Rollouts(rows={rows}, every_n_steps={every_n_steps}): rows of 0 are all, and iterations "
                "count from 1. Leave the callback out for no files."
            )
        self.rows = rows
        self.every_n_steps = every_n_steps
        self.directory = directory
        self._due = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse an algorithm that answers nothing, and a directory that cannot be written."""
        if stage == "fit" and isinstance(pl_module, RLHFAlgorithm) and pl_module.reads_only:
            name = type(pl_module).__name__
            raise ValueError(f"Rollouts: {name} learns from given answers, and draws none. Leave it out.")
        if begins_anew(trainer, stage):
            self._due = False
        if stage == "fit":
            check_output(trainer, output_path(trainer, self.directory, "rollouts"), name="Rollouts")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move files of another run aside, unless this run resumed from it."""
        directory = output_path(trainer, self.directory, "rollouts")
        put_aside(trainer, directory.glob("step-*.jsonl"), directory=directory)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Ask the algorithm to keep the rows of an iteration that will be written."""
        if isinstance(pl_module, RLHFAlgorithm):
            self._due |= (trainer.global_step + 1) % self.every_n_steps == 0
            pl_module.keeps_rollouts, pl_module.kept_rollouts = self._due, None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Write the rows that the algorithm kept; nothing with `fast_dev_run`."""
        if not isinstance(pl_module, RLHFAlgorithm):
            return
        rows, pl_module.kept_rollouts, pl_module.keeps_rollouts = pl_module.kept_rollouts, None, False
        if not rows:
            return
        self._due = False
        if leaves_files(trainer):
            directory = output_path(trainer, self.directory, "rollouts")
            directory.mkdir(parents=True, exist_ok=True)
            first = rows.take(range(min(self.rows or len(rows), len(rows))))
            lines = [json.dumps(json_safe(line)) for line in _lines(first, pl_module, trainer.global_step)]
            with whole(directory / f"step-{trainer.global_step:06d}.jsonl") as file:
                file.writelines(f"{line}\n" for line in lines)

    def state_dict(self) -> dict[str, bool]:
        """Tell a checkpoint whether an iteration is still to be made up for."""
        return {"due": True} if self._due else {}

    def load_state_dict(self, state_dict: Mapping[str, bool]) -> None:
        """Make up for one before the checkpoint."""
        self._due = state_dict["due"]


def _lines(rows: Batch, algorithm: RLHFAlgorithm, step: int) -> Iterator[dict[str, object]]:
    decoded = texts(rows, algorithm.tokenizer)
    columns = {
        "row_id": rows["row_ids"].tolist(),
        "prompt": decoded["prompts"],
        "response": decoded["responses"],
    }
    if "scores" in rows:
        columns["score"] = masked_sum(rows["scores"], rows["response_mask"], dim=1).tolist()
    names = part_names(algorithm.roles())
    if len(names) > 1 and "score_parts" in rows:
        parts = rows["score_parts"].tolist()
        columns["scores"] = [dict(zip(names, each, strict=False)) for each in parts]
    for values in zip(*columns.values(), strict=True):
        yield {"step": step, **dict(zip(columns, values, strict=True))}
