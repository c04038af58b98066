"""Reads the dataflow from the algorithm itself: one `step` over workers that compute nothing and note all.

algorithm.step ---> WorkerGroup ---> Recorder: Call(role, method, rows, waits for)
      ^--- columns of numbers, fetched <--'      what is fetched, everything later waits for
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol

import torch

from rlhf_lightning.controller import Batch, CallReport, WorkerGroup
from rlhf_lightning.controller.block import Block, encode
from rlhf_lightning.controller.call import Call as RemoteCall
from rlhf_lightning.controller.transport import Future, Submitted, Transport
from rlhf_lightning.mapping.dataflow import Call, Dataflow, dataflow_of, kind_of
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.workers import Role

WIDTH = 2
"""Tokens of the prompts and responses that are traced: the dataflow does not depend on their length."""
_OF_ROWS: dict[str, bool | int] = {"row_truncated": False, "row_turns": 1}
"""Columns [B] of an answer, and what they hold of the made-up ones."""
_TOLD = ("approx_kl", "clip_fraction", "entropy", "grad_norm", "loss")
"""What an update says, without its role: a step may stop by it."""


class Traceable(Protocol):
    """What an algorithm must have for its dataflow to be read."""

    def roles(self) -> dict[str, Role]:
        """Models by name."""

    def bind(self, handles: Mapping[str, Role]) -> None:
        """Replace roles by handles."""

    def step(self, batch: Batch) -> object:
        """One iteration."""


@dataclass(frozen=True, eq=False)
class _Noted(Future):
    """A value that a recorded call would have made; None stands for the controller's own."""

    transport: Transport
    call: int | None
    value: object


class _Recorder(Transport):
    """Notes every call and answers with numbers that mean nothing."""

    def __init__(self, functions: frozenset[str]) -> None:
        super().__init__()
        self.functions = functions
        self.calls: list[Call] = []
        self.fetched: set[int] = set()
        self._trained: dict[str, int] = {}

    def submit(self, device: int, call: RemoteCall, blocks: Sequence[Future | Block]) -> Submitted:
        """Note the call; `device` is always 0."""
        index = len(self.calls)
        made = {block.call for block in blocks if isinstance(block, _Noted)}
        after = made | self.fetched | {self._trained.get(call.role)}
        kind = "function" if call.role in self.functions else kind_of(call.method)
        waits_for = frozenset(i for i in after if i is not None)
        self.calls.append(Call(call.role, call.method, kind, call.num_rows, waits_for))
        if kind == "train":
            self._trained[call.role] = index
        told = _TOLD if kind == "train" else ()
        numbers = {f"{call.role}/{name}": 0.0 for name in told}
        report = CallReport(call.role, call.method, 0, 0.0, 0.0, 0, numbers)
        columns = {n: _Noted(self, index, encode(_filled(n, call.num_rows))) for n in call.returns}
        return Submitted(_Noted(self, index, report), columns)

    def fetch(self, futures: Sequence[Future]) -> list[object]:
        """Hand numbers out; whatever is called from now on waits for those who would have made them."""
        noted = [future for future in futures if isinstance(future, _Noted)]
        self.fetched.update(future.call for future in noted if future.call is not None)
        return [future.value for future in noted]

    def share(self, block: Block) -> Future:
        """Keep the block."""
        return _Noted(self, None, block)

    def drain(self) -> list[CallReport]:
        """Nothing is pending."""
        self.fetched.update(range(len(self.calls)))
        return []

    def close(self) -> None:
        """Nothing to end."""


def _filled(name: str, rows: int) -> torch.Tensor:
    """A column as its name says: masks are whole, ids int64, some [rows], and all else float32 [rows, WIDTH].

    Its numbers are those of the rows: from equal scores, or prompts, some algorithms learn nothing.
    """
    if name.endswith("_mask"):
        return torch.ones(rows, WIDTH, dtype=torch.bool)
    if name.endswith("_ids"):
        return torch.arange(rows)[:, None].repeat(1, WIDTH)
    if name in _OF_ROWS:
        return torch.full((rows,), _OF_ROWS[name])
    return torch.arange(rows, dtype=torch.float32)[:, None].repeat(1, WIDTH) / max(rows, 1)


def traced_batch(rows: int, raw: Sequence[Mapping[str, object]] = ()) -> Batch:
    """All that data modules yield, labels of every kind included, for `rows` rows.

    Args:
        rows: of the batch.
        raw: what `rows` holds, over again where they are fewer; a prompt and a data source where empty.
    """
    begin = raw or ({"prompt": "", "data_source": ""},)
    wide = ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "step_mask", "step_labels")
    held: list[object] = [dict(row) for row in islice(cycle(begin), rows)]
    number = {"row_ids": torch.arange(rows), "margins": torch.zeros(rows)}
    truth = dict.fromkeys(("labels", "safe"), torch.arange(rows) % 2 == 0)
    return Batch.of({**{name: _filled(name, rows) for name in wide}, **number, **truth, "rows": held})


def trace(algorithm: Traceable, batch: Batch) -> Dataflow:
    """Run one `step` over made-up rows, and return its dataflow.

    Args:
        algorithm: a copy that nobody needs afterwards: its roles are bound to the recorder.
        batch: what `traced_batch` gives.

    Raises:
        ValueError: the step fails on them.
    """
    roles = algorithm.roles()
    first = next(iter(roles.values()))
    lead = roles.get("actor", first)
    functions = frozenset(name for name, role in roles.items() if not role.following(lead).path)
    recorder = _Recorder(functions)
    handles = {n: r.bound(WorkerGroup(n, recorder, ParallelLayout(), (0,))) for n, r in roles.items()}
    algorithm.bind(handles)
    try:
        algorithm.step(batch)
    except Exception as err:
        lacking = isinstance(err, KeyError | IndexError)
        raise ValueError(
            f"{type(algorithm).__name__}: its dataflow is read by running `step` once on {len(batch)} "
            f"made-up rows, and that failed: {type(err).__name__}: {err}"
            f"{'. Metrics of your own, and fields of rows, may be missing there: try .get' * lacking}"
        ) from err
    return dataflow_of(recorder.calls)
