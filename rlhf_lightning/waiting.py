"""Collects groups of answers over several batches of prompts until there are enough for an update (DAPO)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypedDict, cast

from torch import Tensor

from rlhf_lightning.checkpoint import columns_of
from rlhf_lightning.controller import Batch
from rlhf_lightning.workers import joined, rows_together

logger = logging.getLogger(__name__)

IDLE = 10
"""Consecutive batches without a group to keep, after which a warning is logged."""


class Waited(TypedDict):
    """The waiting groups in a checkpoint."""

    enough: int
    """See `WaitingGroups.enough`."""
    size: int
    """Answers per group, of which `enough` is counted."""
    batch_rows: int
    """Prompts of a whole batch."""
    columns: dict[str, object]
    """Columns of the waiting answers; empty where none wait."""


@dataclass
class WaitingGroups:
    """Groups of answers that wait until there are `enough`; the answers of a group are neighbouring rows."""

    size: int
    """Answers per group."""
    batch_rows: int = 0
    """Prompts of a whole batch; 0 where the data does not say."""
    enough: int = 0
    """Answers to learn from at once: as many as the largest batch had so far."""
    rows: Batch | None = None
    """The answers that wait."""
    idle: int = 0
    """Consecutive batches of which no group was kept."""

    def add(self, answers: Batch, keep: Tensor) -> tuple[int, Batch | None]:
        """Add groups to those that wait; hand a batch over once there are enough.

        Args:
            answers: B rows, group by group.
            keep: [B / size] bool, which groups to add.

        Returns:
            The number of groups there are; and a batch of `enough` answers, or None if there are fewer. With
            a batch any surplus is dropped: it would be of older weights than the next answers.
        """
        self.enough = max(self.enough, len(answers))
        self._count(int(keep.sum()))
        kept = answers.take(keep.repeat_interleave(self.size).nonzero()[:, 0].numpy())
        rows = kept if self.rows is None else joined([self.rows, kept])
        if len(rows) < self.enough:  # fetched, since a view would hold whole batches in the object store
            self.rows = Batch.of(rows.fetch())
            return len(rows) // self.size, None
        self.rows = None
        return len(rows) // self.size, rows.take(range(self.enough))

    def state(self) -> Waited:
        """The state for a checkpoint."""
        columns = columns_of(self.rows, what="groups that wait for others")
        return Waited(enough=self.enough, size=self.size, batch_rows=self.batch_rows, columns=columns)

    def restore(self, state: Waited, *, new_tokens: int) -> None:
        """Continue from a checkpoint; where batches or groups are of another size now, `enough` is of theirs.

        Args:
            state: what `state` returned.
            new_tokens: width of future answers.

        Raises:
            ValueError: groups are of another size, or their answers of another width.
        """
        groups = state["enough"] // state["size"]
        self.enough = groups * self.size if state["batch_rows"] == self.batch_rows else 0
        self.rows = None
        if not state["columns"]:
            return
        self.rows = rows = Batch.of(cast(dict[str, Tensor | list[object]], state["columns"]))
        _check("algo.group_size", self.size, rows_together(rows) if len(rows) else self.size)
        _check("algo.actor.sampling.max_new_tokens", new_tokens, rows["response_mask"].shape[1])

    def _count(self, kept: int) -> None:
        self.idle = 0 if kept else self.idle + 1
        if self.idle == IDLE:
            logger.warning(
                "in %d iterations no group had answers of different scores, and nothing was learned: look at "
                "reward/drawn, at the reward and at the prompts",
                IDLE,
            )


def _check(option: str, now: int, then: int) -> None:
    if now != then:
        raise ValueError(
            f"{option}={now}: the checkpoint holds answers that were not learned from yet, and there it is "
            f"{then}. Go on with --{option} {then}."
        )
