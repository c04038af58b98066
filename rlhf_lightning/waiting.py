"""Groups of answers that wait, over several batches of prompts, until there are enough to learn from."""

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
"""Batches in a row without a group that is worth waiting, after which that is said."""


class Waited(TypedDict):
    """What a checkpoint has of them."""

    enough: int
    """Answers that are enough."""
    columns: dict[str, object]
    """Of those that wait; empty where none do."""


@dataclass
class WaitingGroups:
    """Groups of `size` answers to a prompt, side by side, of as many batches as it takes."""

    size: int
    """Answers of a group."""
    enough: int = 0
    """Answers to learn from: as many as the largest batch had."""
    rows: Batch | None = None
    """Those that wait."""
    idle: int = 0
    """Batches in a row of which no group was kept."""

    def add(self, answers: Batch, keep: Tensor) -> tuple[int, Batch | None]:
        """Let groups wait with those that do.

        Args:
            answers: B rows, group by group.
            keep: [B / size] bool, which groups.

        Returns:
            How many groups there are now; and if these are enough, that many answers. Then none waits any
            more: what is over would be of older weights than the next.
        """
        self.enough = max(self.enough, len(answers))
        self._count(int(keep.sum()))
        kept = answers.take(keep.repeat_interleave(self.size).nonzero()[:, 0].numpy())
        rows = kept if self.rows is None else joined([self.rows, kept])
        if len(rows) < self.enough:  # fetched, since a view would hold whole batches in the object store
            self.rows = Batch.of({name: rows.column(name).fetch() for name in rows})
            return len(rows) // self.size, None
        self.rows = None
        return len(rows) // self.size, rows.take(range(self.enough))

    def state(self) -> Waited:
        """For a checkpoint."""
        return {"enough": self.enough, "columns": columns_of(self.rows, what="groups that wait for others")}

    def restore(self, state: Waited, *, new_tokens: int) -> None:
        """Go on from a checkpoint.

        Args:
            state: what `state` gave.
            new_tokens: width of the answers to come.

        Raises:
            ValueError: groups are of another size, or their answers of another width.
        """
        self.enough, self.rows = state["enough"], None
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
