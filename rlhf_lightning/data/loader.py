"""A loader of training batches that can stop and resume within an epoch.

    num_workers 0       sampler --> rows --> collate --> step         in turn
    num_workers 1       sampler --> [ worker: rows --> collate ] --> queue of 2 --> step
                                      |______ runs while the step runs ______|

The state is that after the last batch that a step has taken; batches still in the queue are made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from rlhf_lightning.data.batch import Collate, EncodedRows, RowBatch
from rlhf_lightning.data.sampler import EpochSampler

_FIXED = ("num_workers", "batch_size")
"""Options that may not change in the middle of an epoch."""


class RowLoader(StatefulDataLoader):  # type: ignore[misc]  # it comes without types
    """Draws rows in the sampler's order.

    Args:
        rows: to draw from.
        batch_size: keys of a batch, each of which draws one row or one pair; an epoch's last may have fewer.
        drop_last: leave a last batch out that has fewer.
        sampler: yields the keys, in order.
        collate: makes a batch of rows.
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
        self._loaded: dict[str, object] | None = None  # a state to resume from, until a batch is asked for

    def __iter__(self) -> Iterator[RowBatch]:
        """Begin, and start workers, at the first batch: a Trainer tells the epoch between `iter` and that."""
        self._loaded = None
        yield from super().__iter__()

    def state_dict(self) -> dict[str, object]:
        """Where the batches that were taken end, and what the batches that follow depend on."""
        state = super().state_dict() if self._loaded is None else self._loaded
        options = {option: getattr(self, option) for option in _FIXED}
        return {**state, **options, "order": self.sampler.order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration continue where the state was taken.

        Raises:
            ValueError: the state is of other rows, other options, or of a `MixedLoader`.
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
        self._loaded = state_dict
        super().load_state_dict(state_dict)

    def close(self) -> None:
        """End the workers."""
        self._iterator = None
