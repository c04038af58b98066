"""RowLoader: batches of training rows, which can stop and resume within an epoch.

    num_workers 0       sampler --> rows --> collate --> step         in turn
    num_workers 1       sampler --> [ worker: rows --> collate ] --> queue of 2 --> step
                                      |______ runs while the step runs ______|

The state is that after the last batch which the step has taken; batches in the queue are made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from rlhf_lightning.data.batch import Collate, EncodedRows, RowBatch
from rlhf_lightning.data.sampler import EpochSampler

_FIXED = ("num_workers", "batch_size")
"""What may not change in the middle of an epoch."""


class RowLoader(StatefulDataLoader):  # type: ignore[misc]  # it comes without types
    """Draws rows in the sampler's order.

    Args:
        rows: to draw from.
        batch_size: of the keys that a batch draws; the last one of an epoch may draw fewer.
        drop_last: leave that one out.
        sampler: their order.
        collate: makes a batch of them.
        num_workers: processes that make batches ahead; 0 makes each when it is asked for.
    """

    def __init__(
        self,
        rows: EncodedRows,
        *,
        batch_size: int,
        drop_last: bool = False,
        sampler: EpochSampler,
        collate: Collate,
        num_workers: int,
    ) -> None:
        super().__init__(
            rows,
            batch_size=batch_size,
            drop_last=drop_last,
            sampler=sampler,
            collate_fn=collate,
            num_workers=num_workers,
        )
        self._waiting: dict[str, object] | None = None  # a state that was loaded, until workers take it

    def __iter__(self) -> Iterator[RowBatch]:
        return self._from_workers() if self.num_workers else super().__iter__()

    def _from_workers(self) -> Iterator[RowBatch]:
        """Start them at the first batch: they draw ahead, and a Trainer tells the epoch only after `iter`."""
        self._waiting = None
        yield from super().__iter__()

    def state_dict(self) -> dict[str, object]:
        """Where the batches that were taken end, and what decides the batches that follow."""
        state = super().state_dict() if self._waiting is None else self._waiting
        options = {option: getattr(self, option) for option in _FIXED}
        return {**state, **options, "order": self.sampler.order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration go on where the state was taken.

        Raises:
            ValueError: the state is that of other rows, of another number of workers, or of two loaders.
        """
        if "ptx" in state_dict:
            raise ValueError(
                "the checkpoint was taken in the middle of an epoch with a second data module, data.ptx. "
                "Resume with the same data options."
            )
        for option in _FIXED:
            here = getattr(self, option)
            there = state_dict.get(option, here)
            if there != here:
                raise ValueError(
                    f"data.{option}={here}: the epoch of the checkpoint was begun with {there}. "
                    f"Resume with --data.{option} {there}."
                )
        self.sampler.check(state_dict.get("order", {}))
        self._waiting = state_dict if self.num_workers else None
        super().load_state_dict(state_dict)

    def close(self) -> None:
        """End the workers."""
        self._iterator = None
