"""The order of the rows: a new seeded permutation in each epoch, which can stop and resume within it.

A key names a row in an epoch: `epoch << 32 | index`. The sampler yields keys, the data set is indexed by
them, and they become row ids, so that nothing else has to know the epoch. Where rows are drawn one by one,
the number of the draw takes the epoch's place.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor
from torch.utils.data import Sampler, SequentialSampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

EPOCH_BITS = 32
INDEX_MASK = (1 << EPOCH_BITS) - 1
Draw = Callable[[int, Generator], int]
HELD_OUT = 1 << (EPOCH_BITS - 1)
"""Added to the keys of validation rows, so that these differ from those of all training rows."""


class EpochSampler(Sampler[int]):
    """Yields the keys of one epoch, and keeps its position in it for checkpoints.

    Args:
        size: number of rows.
        shuffle: draw a new order for every epoch; otherwise the file's order.
        seed: of the order.
        fingerprint: of the rows, by which others are noticed; 0 where nobody knows them.

    An epoch that was read to its end advances `epoch` by itself; Lightning's `set_epoch` says the same.
    """

    drawn = False
    """Whether each row is drawn when it is asked for."""

    def __init__(self, *, size: int, shuffle: bool, seed: int, fingerprint: int = 0) -> None:
        self.size = size
        self.fingerprint = fingerprint
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._position = 0
        self._start = 0
        self._announced = 0
        self._heard: int | None = None  # the announced epoch, until a row of it is read
        self._resumed = False

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        # The epoch is read at the first row, not before: Lightning makes the iterator, then sets the epoch.
        epoch, self._heard = self.epoch, None
        start, self._start = self._start, 0
        for position, key in enumerate(self._keys(epoch, start), start + 1):
            self._position = position
            yield key
        self.epoch, self._position = epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless it is under way already.

        After a resume the sampler keeps its own count of epochs, and takes a new number only as news that the
        epoch was cut short: Lightning counts one too many after a checkpoint saved by an epoch's validation.
        """
        if not self._resumed:
            begins, following = epoch != self.epoch, epoch
        else:
            begins, following = epoch != self._announced and self._position > 0, self.epoch + 1
        self._announced = self._heard = epoch
        if begins:
            self.epoch, self._position, self._start = following, 0, 0

    def order(self) -> dict[str, int]:
        """What the order of the rows depends on, beside the epoch."""
        return {"size": self.size, "shuffle": self.shuffle, "seed": self.seed, "drawn": self.drawn}

    def check(self, order: Mapping[str, int]) -> None:
        """Refuse to resume an epoch with another number of rows, or in another kind of order.

        Args:
            order: the interrupted epoch's, as from `order`; values that it lacks are taken as unchanged.
        """
        if order.get("drawn", self.drawn) != self.drawn:
            raise ValueError(
                "the checkpoint was taken in the middle of an epoch of data "
                f"{'without' if self.drawn else 'with'} a `draw` of its own, so that rows would come twice "
                "or never. Resume with the same data."
            )
        if order.get("size", self.size) != self.size:
            raise ValueError(
                f"the checkpoint was taken in the middle of {order['size']} rows, the data has "
                f"{self.size} now. Resume with the same data options, or start a new run from the "
                "checkpoint's exported model."
            )
        began, now = (str(bool(x)).lower() for x in (order.get("shuffle", self.shuffle), self.shuffle))
        if began != now:
            raise ValueError(
                f"data.shuffle={now}: the checkpoint was taken in the middle of another order, so that rows "
                f"would come twice or never. Resume with --data.shuffle {began}."
            )

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the number of its rows that were handed out, and what their order depends on."""
        where = {"epoch": self.epoch, "position": self._position, "announced_epoch": self._announced}
        return where | self.order() | {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next iteration go on where the state was taken.

        An epoch that was announced before the state came is announced again: a loader with workers takes its
        state when it starts them. The order goes on with the seed that it began with.

        Raises:
            ValueError: the order cannot go on; see `check`.
        """
        self.check(state)
        if state.get("fingerprint", self.fingerprint) != self.fingerprint:
            logger.warning(
                "the data has other rows than those in whose middle the checkpoint was taken, and as many: "
                "the epoch goes on with them, so that some may come twice or never."
            )
        if self.shuffle and state.get("seed", self.seed) != self.seed:
            logger.warning("rows go on in the order of the checkpoint's seed, %d", state["seed"])
            self.seed = state["seed"]
        self.epoch = state["epoch"]
        self._position = self._start = state["position"]
        self._announced = state["announced_epoch"]
        self._resumed = True
        if self._heard is not None:
            self.set_epoch(self._heard)

    def _keys(self, epoch: int, start: int) -> Iterator[int]:
        """The keys of an epoch, from a position on."""
        order = permutation(self.size, self.seed, epoch) if self.shuffle else torch.arange(self.size)
        return (epoch << EPOCH_BITS | index for index in order[start:].tolist())


class FirstRows(EpochSampler, SequentialSampler):
    """Yields the rows in the order of the data, for `overfit_batches`.

    It is a SequentialSampler because Lightning, to overfit, replaces every sampler that is not.
    """


class DrawnRows(EpochSampler):
    """Yields rows that are drawn one by one, each when it is asked for; one may come several times an epoch.

    A key has the number of the draw in the place of the epoch, so that a row is answered anew each time.

    Args:
        draw: returns the index of a row, of the draw's number and a generator of its own.
        size: number of rows, and of draws in an epoch.
        seed: of the generators.
        fingerprint: of the rows.
    """

    drawn = True

    def __init__(self, *, draw: Draw, size: int, seed: int, fingerprint: int = 0) -> None:
        super().__init__(size=size, shuffle=True, seed=seed, fingerprint=fingerprint)
        self._draw = draw

    def _keys(self, epoch: int, start: int) -> Iterator[int]:
        for number in range(epoch * self.size + start, (epoch + 1) * self.size):
            index = int(self._draw(number, _generator(self.seed, number)))
            if not 0 <= index < self.size:
                raise ValueError(
                    f"draw({number}, ...) of the data gives {index}, and there are {self.size} rows: give 0 "
                    f"to {self.size - 1}, a row's place in train_rows (of pairs, the pair's)."
                )
            yield number << EPOCH_BITS | index


def permutation(size: int, *seeds: int) -> Tensor:
    """A random permutation of the numbers below `size`, [size] int64, from several seeds together."""
    return torch.randperm(size, generator=_generator(*seeds))


def _generator(*seeds: int) -> Generator:
    # Mixed into 32 bits: the generator ignores the upper half of a seed.
    return Generator().manual_seed(zlib.crc32("/".join(map(str, seeds)).encode()))
