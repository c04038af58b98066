"""The transport over Ray: one actor a device, values in the object store, failures named.

driver:  submit -> actor.call.remote(call, *refs)  -> ObjectRef of the report, ObjectRef of each column
         fetch  -> ray.wait(ref) in slices of POLL_S; between slices look whether any pending call failed
actors:  take the blocks behind `refs` straight from the object store of the node that has them
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.call import Call, CallReport
from rlhf_lightning.controller.errors import WorkerError, WorkerTimeoutError
from rlhf_lightning.controller.ray_types import DeviceHandle, Ref
from rlhf_lightning.controller.transport import Future, Submitted, Transport

POLL_S = 0.5
"""Between two looks at the pending calls while waiting for a value."""
GRACE_S = 2.0
"""After a failure, how long to wait for the death of a device that explains it."""


class Owner(Protocol):
    """What ends the actors when the transport closes."""

    def close(self) -> None:
        """End everything that was started."""


@dataclass(frozen=True, eq=False)
class RayFuture(Future):
    """An object reference."""

    ref: Ref
    transport: RayTransport

    def fetch(self) -> object:
        """Wait for the value, and meanwhile for any failure."""
        return self.transport.counted(self.transport.wait(self.ref))


@dataclass(frozen=True)
class Pending:
    """A call that has not been seen to end."""

    ref: Ref
    call: Call
    device: int
    submitted_s: float

    def name(self) -> str:
        """Role, device and method, as errors have them."""
        return f"{self.call.role}[rank {self.call.rank}, device {self.device}].{self.call.method}"


class RayTransport(Transport):
    """Calls to the actors of one job."""

    def __init__(self, actors: Sequence[DeviceHandle], owner: Owner, *, timeout_s: float) -> None:
        super().__init__()
        self.actors = list(actors)
        self.timeout_s = timeout_s
        self._owner = owner
        self._pending: list[Pending] = []
        self._reports: list[CallReport] = []

    def submit(self, device: int, call: Call, blocks: Sequence[Future | Block]) -> Submitted:
        """Send a call to an actor; it waits there for the blocks that are still being made."""
        arguments = [block.ref if isinstance(block, RayFuture) else block for block in blocks]
        method = self.actors[device].submit.options(num_returns=1 + len(call.returns))
        sent = method.remote(call, *arguments)
        report, *columns = sent if isinstance(sent, list) else [sent]
        self._pending.append(Pending(report, call, device, time.monotonic()))
        futures: dict[str, Future] = {
            n: RayFuture(c, self) for n, c in zip(call.returns, columns, strict=True)
        }
        return Submitted(RayFuture(report, self), futures)

    def share(self, block: Block) -> Future:
        """Put a block into the object store."""
        return RayFuture(ray.put(block), self)

    def wait(self, ref: Ref) -> object:
        """Wait for one object.

        Raises:
            WorkerError: its call or any other pending call failed.
            WorkerTimeoutError: no call ended within `timeout_s`.
        """
        last_progress = time.monotonic()
        while not ray.wait([ref], timeout=POLL_S, fetch_local=False)[0]:
            if self._collect():
                last_progress = time.monotonic()
            waited = time.monotonic() - last_progress
            if waited > self.timeout_s:
                names = ", ".join(pending.name() for pending in self._pending[:4])
                raise WorkerTimeoutError(f"no call ended for {waited:.0f} s; still waiting for {names}.")
        try:
            return ray.get(ref)
        except RayError as err:
            self._fail(err, next((p for p in self._pending if p.ref == ref), None))

    def drain(self) -> list[CallReport]:
        """Wait for every pending call; return the reports of all calls since the last drain."""
        while self._pending:
            self.wait(self._pending[0].ref)
            self._collect()
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """End the actors."""
        self._pending.clear()
        self._owner.close()

    def _collect(self) -> int:
        """Move the calls that ended from pending to reports; return how many there were."""
        if not self._pending:
            return 0
        by_ref = {pending.ref: pending for pending in self._pending}
        ended = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0, fetch_local=False)[0]
        for ref in ended:
            try:
                self._reports.append(ray.get(ref))
            except RayError as err:
                self._fail(err, by_ref[ref])
        done = set(ended)
        self._pending = [pending for pending in self._pending if pending.ref not in done]
        return len(ended)

    def _fail(self, err: RayError, pending: Pending | None) -> NoReturn:
        """Raise the failure that explains the others: a device's death before errors that it caused."""
        death = err if isinstance(err, ActorDiedError) else None
        deadline = time.monotonic() + GRACE_S
        while death is None and time.monotonic() < deadline:
            for other in self._pending:
                if (found := self._death(other)) is not None:
                    death, pending = found, other
                    break
            time.sleep(0.1)
        calls, self._pending = self._pending, []
        if death is not None:
            dead = pending if pending is not None else next((c for c in calls if self._death(c)), None)
            where = dead.name() if dead is not None else "a device"
            raise WorkerError(f"{where}: its process died. {death}") from None
        cause = err.cause if isinstance(err, RayTaskError) else err
        raise WorkerError(str(cause)) from None

    @staticmethod
    def _death(pending: Pending) -> ActorDiedError | None:
        if not ray.wait([pending.ref], timeout=0, fetch_local=False)[0]:
            return None
        try:
            ray.get(pending.ref)
        except ActorDiedError as err:
            return err
        except RayError:
            return None
        return None
