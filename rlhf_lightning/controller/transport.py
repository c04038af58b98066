"""How the controller reaches devices: what a transport must do.

controller --submit(call, blocks)--> device 0..n-1      returns at once, one future per result
controller --fetch(futures)---------------------->      raises the first failure of any pending call
device i   <--blocks--- object store <--blocks--- device j   (never through the controller)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.call import Call, CallReport
from rlhf_lightning.controller.errors import WorkerError

Kind = TypeVar("Kind", bound="Future")


class Future:
    """A value that a device computes, and that may stay there: only `fetch_all` brings it here."""

    transport: Transport


def fetch_all(futures: Sequence[Future]) -> list[object]:
    """Bring the values of several futures of one transport into this process, waiting for all at once.

    Raises:
        WorkerError: a call that makes one failed, or any other pending call did.
    """
    return futures[0].transport.fetch(futures) if futures else []


def futures_of(kind: type[Kind], sources: Sequence[Future | Block]) -> list[Kind]:
    """The futures among sources, all of the kind that a transport makes.

    Raises:
        WorkerError: one is of another kind.
    """
    found = [source for source in sources if isinstance(source, Future)]
    ours = [future for future in found if isinstance(future, kind)]
    if len(ours) < len(found):
        raise WorkerError(
            "a column is of a run with another strategy, from whose devices these cannot take it: read it "
            'within that run, and hand on batch["scores"] itself, not the batch.'
        )
    return ours


@dataclass(frozen=True)
class Submitted:
    """The futures of one call."""

    report: Future
    """Future of the CallReport."""
    columns: Mapping[str, Future]
    """Futures of the returned Blocks, by column."""


class Transport(ABC):
    """Carries calls to devices and values back."""

    def __init__(self) -> None:
        self.fetched_bytes = 0
        """Bytes of numbers that the controller has fetched from devices."""
        self.closed = False
        """Whether the run is over, and with it whatever devices have made."""

    @abstractmethod
    def submit(self, device: int, call: Call, blocks: Sequence[Future | Block]) -> Submitted:
        """Hand a call to the device of this global rank and return at once.

        Args:
            device: global rank.
            call: what to run.
            blocks: one for each pick of `call.columns`, then for each of its `by`, in order.
        """

    @abstractmethod
    def fetch(self, futures: Sequence[Future]) -> list[object]:
        """Bring values into this process, waiting for all of them at once.

        Raises:
            WorkerError: a call that makes one failed, or any other pending call did.
        """

    def shared(self, block: Block) -> Future | Block:
        """What goes to devices for a large block of this process: the block, unless they can fetch it."""
        return block

    @abstractmethod
    def drain(self) -> list[CallReport]:
        """Wait for every pending call; return the reports of all calls since the last drain.

        Raises:
            WorkerError: one of them failed.
        """

    @abstractmethod
    def close(self) -> None:
        """End every device; safe to call twice and after a failure."""

    def counted(self, value: object) -> object:
        """Add a fetched block to `fetched_bytes` and hand it on."""
        if isinstance(value, Block):
            self.fetched_bytes += value.size_bytes
        return value
