"""The transport over Ray: one actor a device, values in the object store, failures named.

driver:  submit -> actor.submit.remote(parcel, *refs) -> ObjectRef of the report, ObjectRef of each shard
                -> actor.ask.remote() for a bare call -> ObjectRef of the report
         fetch  -> ray.get(refs); after POLL_S ray.wait(refs), checking whether any pending call failed
actors:  fetch the shards behind `refs` straight from the object store of the node that has them
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, cast
from weakref import WeakKeyDictionary

import ray
from ray.exceptions import GetTimeoutError, RayError

from rlhf_lightning.controller.block import Block, Shard
from rlhf_lightning.controller.call import Call, CallReport
from rlhf_lightning.controller.errors import WorkerError, WorkerTimeoutError
from rlhf_lightning.controller.failure import Pending, explained, room_for
from rlhf_lightning.controller.parcel import Packer, Parcel, ShardColumn, opened, task_name
from rlhf_lightning.controller.ray_types import DeviceHandle, Ref, SplitMethod
from rlhf_lightning.controller.transport import Future, Submitted, Transport, futures_of

POLL_S = 0.5
"""Seconds between two checks of the pending calls while waiting for a value."""
SHARED = "shared"
"""Column name in shards that the controller itself puts into the store."""


class Owner(Protocol):
    """What starts the actors, and ends them when the transport closes."""

    actors: list[DeviceHandle]
    """By global rank."""
    labels: list[str]
    """What errors call each of them."""
    spans_nodes: bool
    """Whether the controller and the devices are on more than one node."""

    def close(self) -> None:
        """End everything that was started."""


@dataclass(frozen=True, eq=False)
class RayFuture(Future):
    """An object reference."""

    ref: Ref
    transport: RayTransport
    column: str | None
    """Which block of a shard; None where the object is a report."""
    maker: str
    """The call that makes it, as errors name it."""

    def opened(self, found: object) -> object:
        """The value in the fetched object."""
        return opened(cast(bytes, found)) if self.column is None else cast(Shard, found)[self.column]


class RayTransport(Transport):
    """Calls to the actors of one job."""

    def __init__(self, owner: Owner, *, timeout_s: float) -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self._owner = owner
        self._packer = Packer()
        self._methods: dict[tuple[int, int | str], SplitMethod] = {}
        self._pending: list[Pending] = []
        self._reports: list[CallReport] = []
        self._shared: WeakKeyDictionary[Block, RayFuture] = WeakKeyDictionary()

    def submit(self, device: int, call: Call, blocks: Sequence[Future | Block]) -> Submitted:
        """Send a call to an actor, where it waits for blocks that are still being made."""
        objects = self._objects(call.returns)
        maker = f"{call.role}[rank {call.rank}, {self._owner.labels[device]}].{call.method}"
        sent = self._ask(device, call) if call.bare else self._send(device, call, blocks, objects, maker)
        *refs, report = sent if isinstance(sent, list) else [sent]
        self._pending.append(Pending(report, maker, self._owner.actors[device], f"{call.role}.{call.method}"))
        columns: dict[str, Future] = {
            name: RayFuture(ref, self, name, maker)
            for ref, names in zip(refs, objects, strict=True)
            for name in names
        }
        return Submitted(RayFuture(report, self, None, maker), columns)

    def _ask(self, device: int, call: Call) -> Ref | list[Ref]:
        """Send a bare call, without a parcel: that would add a sixth to the time of a round trip."""
        return self._method(device, task_name(call)).remote()

    def _send(
        self,
        device: int,
        call: Call,
        blocks: Sequence[Future | Block],
        objects: tuple[tuple[str, ...], ...],
        maker: str,
    ) -> Ref | list[Ref]:
        shards: dict[Ref, int] = {}
        _refuse_past(futures_of(RayFuture, blocks))
        sources = tuple(_source(block, shards) for block in blocks)
        packed = self._packer.packed(Parcel(call, sources, objects))
        with room_for(maker, len(packed)):
            return self._method(device, 1 + len(objects)).remote(packed, *shards)

    def _objects(self, returns: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """One object for all columns; on several nodes one per column: only those that are read travel."""
        if self._owner.spans_nodes:
            return tuple((name,) for name in returns)
        return (returns,) if returns else ()

    def _method(self, device: int, wanted: int | str) -> SplitMethod:
        """`submit` with this many results, or `ask` under this name; cached, since Ray makes them slowly."""
        key = (device, wanted)
        if key not in self._methods:
            actor = self._owner.actors[device]
            if isinstance(wanted, str):
                self._methods[key] = actor.ask.options(name=wanted)
            else:
                self._methods[key] = actor.submit.options(num_returns=wanted)
        return self._methods[key]

    def shared(self, block: Block) -> Future:
        """The future of a block, which is put into the object store when it is first asked for.

        Raises:
            WorkerError: the store is full.
        """
        if block not in self._shared:
            maker = "handing a column to the devices"
            with room_for(maker, block.size_bytes):
                self._shared[block] = RayFuture(ray.put({SHARED: block}), self, SHARED, maker)
        return self._shared[block]

    def fetch(self, futures: Sequence[Future]) -> list[object]:
        """Bring values here.

        Raises:
            WorkerError: a call that makes one or any other pending call failed, or they are not of this run.
            WorkerTimeoutError: no call ended within `timeout_s`.
        """
        ours = futures_of(RayFuture, futures)
        _refuse_past(ours)
        refs = list(dict.fromkeys(future.ref for future in ours))  # Ray waits for none twice
        try:
            found = dict(zip(refs, self._get(refs), strict=True))
        except RayError as err:
            self._fail(err, reading=ours[0].maker)
        return [self.counted(future.opened(found[future.ref])) for future in ours]

    def _get(self, refs: list[Ref]) -> list[object]:
        """The objects; while waiting, checks the pending calls every POLL_S."""
        try:
            return list(ray.get(refs, timeout=POLL_S))
        except GetTimeoutError:
            self._wait(refs)
        try:
            return list(ray.get(refs, timeout=self.timeout_s))
        except GetTimeoutError:
            raise WorkerTimeoutError(
                f"what calls have made did not come to the controller in {self.timeout_s:.0f} s: the network "
                "or a full object store holds it up."
            ) from None

    def _wait(self, refs: list[Ref]) -> None:
        last_progress = time.monotonic()
        while len(ray.wait(refs, num_returns=len(refs), timeout=POLL_S, fetch_local=False)[0]) < len(refs):
            if self._collect():
                last_progress = time.monotonic()
            waited = time.monotonic() - last_progress
            if waited > self.timeout_s:
                names = ", ".join(pending.name for pending in self._pending[:4])
                raise WorkerTimeoutError(f"no call ended for {waited:.0f} s; still waiting for {names}.")

    def drain(self) -> list[CallReport]:
        """Wait for every pending call; return the reports of all calls since the last drain."""
        while self._pending:
            self._wait([self._pending[0].ref])
            self._collect()
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """End the actors."""
        self.closed = True
        self._pending.clear()
        self._methods.clear()
        self._owner.close()

    def _collect(self) -> int:
        """Move the calls that ended from pending to reports; return how many there were."""
        if not self._pending:
            return 0
        by_ref = {pending.ref: pending for pending in self._pending}
        ended = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0, fetch_local=False)[0]
        try:
            self._reports += [opened(cast(bytes, report)) for report in ray.get(ended)]
        except RayError as err:
            self._fail(err, reading=self._pending[0].name)
        done = set(ended)
        self._pending = [pending for pending in self._pending if pending.ref not in done]
        return len(ended)

    def _fail(self, err: RayError, *, reading: str) -> NoReturn:
        """Raise the failure that explains an error; see `explained`."""
        pending, self._pending = self._pending, []
        raise explained(err, pending, reading=reading) from None


def _refuse_past(futures: Sequence[RayFuture]) -> None:
    """Refuse what an earlier run has made: Ray would start anew to look for it.

    Raises:
        WorkerError: one is of a run that is over.
    """
    if any(future.transport.closed for future in futures):
        raise WorkerError(
            "the run is over, and its columns went with its devices: read them within step, or keep "
            'batch["scores"] itself, not the batch.'
        )


def _source(block: Future | Block, shards: dict[Ref, int]) -> ShardColumn | Block:
    """Where the device finds a block; its shard is added to `shards`, those sent with the call."""
    if isinstance(block, Block):
        return block
    assert isinstance(block, RayFuture)
    assert block.column is not None
    return shards.setdefault(block.ref, len(shards)), block.column
