"""Reads the dataflow from the algorithm itself: one `step` over workers that compute nothing and note all.

algorithm.step ---> WorkerGroup ---> Recorder: Call(role, method, rows, waits for)
      ^--- columns of zeros, fetched <--'      what is fetched, everything later waits for
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rlhf_lightning.controller import Batch, CallReport, WorkerGroup
from rlhf_lightning.controller import call as controller
from rlhf_lightning.controller.block import Block, encode
from rlhf_lightning.controller.transport import Future, Submitted, Transport
from rlhf_lightning.mapping.dataflow import Call, Dataflow, dataflow_of, kind_of
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.workers import Role

WIDTH = 2
"""Tokens of the prompts and responses that are traced: the dataflow does not depend on their length."""


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
    """Notes every call and answers with zeros."""

    def __init__(self, functions: frozenset[str]) -> None:
        super().__init__()
        self.functions = functions
        self.calls: list[Call] = []
        self.fetched: set[int] = set()
        self._trained: dict[str, int] = {}

    def submit(self, device: int, call: controller.Call, blocks: Sequence[Future | Block]) -> Submitted:
        """Note the call; `device` is always 0."""
        index = len(self.calls)
        made = {block.call for block in blocks if isinstance(block, _Noted)}
        after = made | self.fetched | {self._trained.get(call.role)}
        kind = "function" if call.role in self.functions else kind_of(call.method)
        waits_for = frozenset(i for i in after if i is not None)
        self.calls.append(Call(call.role, call.method, kind, call.num_rows, waits_for))
        if kind == "train":
            self._trained[call.role] = index
        report = CallReport(call.role, call.method, 0, 0.0, 0.0, 0, {})
        columns = {n: _Noted(self, index, encode(_zeros(n, call.num_rows))) for n in call.returns}
        return Submitted(_Noted(self, index, report), columns)

    def fetch(self, futures: Sequence[Future]) -> list[object]:
        """Hand zeros out; whatever is called from now on waits for those who would have made them."""
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


def _zeros(name: str, rows: int) -> torch.Tensor:
    """A column as its name says: ids and masks are whole, all else is float32 [rows, WIDTH]."""
    if name.endswith("_mask"):
        return torch.ones(rows, WIDTH, dtype=torch.bool)
    return torch.zeros(rows, WIDTH, dtype=torch.int64 if name.endswith("_ids") else torch.float32)


def zero_batch(rows: int) -> Batch:
    """What a data module yields, responses included, of `rows` rows of zeros."""
    names = ("prompt_ids", "prompt_mask", "response_ids", "response_mask")
    raw: list[object] = [{"prompt": "", "data_source": ""}] * rows
    return Batch.of({**{n: _zeros(n, rows) for n in names}, "row_ids": torch.arange(rows), "rows": raw})


def trace(algorithm: Traceable, rows: int) -> Dataflow:
    """Run one `step` over rows of zeros, and return its dataflow.

    Args:
        algorithm: a copy that nobody needs afterwards: its roles are bound to the recorder.
        rows: prompts of the batch.

    Raises:
        ValueError: the step fails on zeros.
    """
    roles = algorithm.roles()
    first = next(iter(roles.values()))
    lead = roles.get("actor", first)
    functions = frozenset(name for name, role in roles.items() if not role.following(lead).path)
    recorder = _Recorder(functions)
    handles = {n: r.bound(WorkerGroup(n, recorder, ParallelLayout(), (0,))) for n, r in roles.items()}
    algorithm.bind(handles)
    try:
        algorithm.step(zero_batch(rows))
    except Exception as err:
        raise ValueError(
            f"{type(algorithm).__name__}: its dataflow is read by running `step` once on {rows} rows of "
            f"zeros, and that failed: {type(err).__name__}: {err}"
        ) from err
    return dataflow_of(recorder.calls)
