"""Reads an algorithm's dataflow by running one `step` whose remote calls are recorded instead of computed.

algorithm.step ---> WorkerGroup ---> _Recorder: Call(role, method, rows, waits for)
      ^---- made-up numbers, fetched <----'
A fetched result may decide what the step does next, so that every later call waits for it.
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
from rlhf_lightning.mapping.dataflow import Call, Dataflow, Kind, dataflow_of, kind_of
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.workers import Actor, Role

WIDTH = 2
"""Tokens of the prompts and responses that are traced: the dataflow does not depend on their length."""
_PER_ROW: dict[str, bool | int] = {"row_truncated": False, "row_turns": 1}
"""Columns of generations whose made-up value is this in each row."""
_UPDATE_METRICS = ("approx_kl", "clip_fraction", "entropy", "grad_norm", "loss")
"""Metrics that every recorded update returns, as `<role>/<name>`: a step may stop early by them."""


class Traceable(Protocol):
    """What an algorithm must have for its dataflow to be read."""

    def placed(self) -> dict[str, Role]:
        """Models by name, those that a step calls."""

    def bind(self, roles: Mapping[str, Role]) -> None:
        """Replace roles by handles."""

    def step(self, batch: Batch) -> object:
        """One iteration."""


@dataclass(frozen=True, eq=False)
class _Recorded(Future):
    """A made-up result of a recorded call."""

    transport: Transport
    call: int
    """Index of the call."""
    value: object


class _Recorder(Transport):
    """Records every call, and returns made-up numbers at once.

    Args:
        functions: roles that run no model.
        rescoring: actors that compute the log-probabilities of what they have drawn again.
    """

    def __init__(self, functions: frozenset[str], rescoring: frozenset[str]) -> None:
        super().__init__()
        self.functions, self.rescoring = functions, rescoring
        self.calls: list[Call] = []
        self.fetched: set[int] = set()
        self._trained: dict[str, int] = {}

    def submit(self, device: int, call: RemoteCall, blocks: Sequence[Future | Block]) -> Submitted:
        """Record the call; `device` is always 0."""
        index = len(self.calls)
        made = {block.call for block in blocks if isinstance(block, _Recorded)}
        trained = {self._trained[call.role]} if call.role in self._trained else set()
        kind = self._kind(call)
        waits_for = frozenset(made | self.fetched | trained)
        self.calls.append(Call(call.role, call.method, kind, call.num_rows, waits_for))
        if kind == "train":
            self._trained[call.role] = index
        if kind == "generate" and call.role in self.rescoring and not call.arguments.get("greedy"):
            # A part of the call on its devices: what reads the answers waits for it.
            self.calls.append(Call(call.role, call.method, "infer", call.num_rows, frozenset({index})))
            index += 1
        names = _UPDATE_METRICS if kind == "train" else ()
        metrics = {f"{call.role}/{name}": 0.0 for name in names}
        report = CallReport(call.role, call.method, 0, 0.0, 0.0, 0, metrics)
        columns = {n: _Recorded(self, index, encode(_made_up(n, call.num_rows))) for n in call.returns}
        return Submitted(_Recorded(self, index, report), columns)

    def _kind(self, call: RemoteCall) -> Kind:
        """What a call does; a method that is no generation or update, and reads no prompts, runs no model."""
        kind = kind_of(call.method)
        blind = kind == "infer" and all(column.name != "prompt_ids" for column in call.columns)
        return "function" if blind or call.role in self.functions else kind

    def fetch(self, futures: Sequence[Future]) -> list[object]:
        """Return the made-up values; every later call waits for the calls that they stand for."""
        noted = [future for future in futures if isinstance(future, _Recorded)]
        self.fetched.update(future.call for future in noted)
        return [future.value for future in noted]

    def drain(self) -> list[CallReport]:
        """Take all calls as done: every later call waits for them."""
        self.fetched.update(range(len(self.calls)))
        return []

    def close(self) -> None:
        """Do nothing."""


def _made_up(name: str, rows: int) -> torch.Tensor:
    """A made-up column, by its name: `row_*` [rows], others [rows, WIDTH]; see `_wide` for the values."""
    wide = _wide(name, rows)
    return wide[:, 0] if name.startswith("row_") else wide


def _wide(name: str, rows: int) -> torch.Tensor:
    """Made-up values [rows, WIDTH] by name: `*_mask` all True, `*_ids` int64, `_PER_ROW`, others float32.

    Rows differ, since from equal scores or prompts some algorithms learn nothing.
    """
    if name.endswith("_mask"):
        return torch.ones(rows, WIDTH, dtype=torch.bool)
    if name.endswith("_ids"):
        return torch.arange(rows)[:, None].repeat(1, WIDTH)
    if name in _PER_ROW:
        return torch.full((rows, WIDTH), _PER_ROW[name])
    return torch.arange(rows, dtype=torch.float32)[:, None].repeat(1, WIDTH) / max(rows, 1)


def traced_batch(rows: int, raw: Sequence[Mapping[str, object]] = ()) -> Batch:
    """A made-up batch with every column that a data module can have, labels of all kinds included.

    Args:
        rows: how many.
        raw: raw rows for its column `rows`, repeated where they are fewer; empty: a prompt and a data source.
    """
    begin = raw or ({"prompt": "", "data_source": ""},)
    wide = ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "step_mask", "step_labels")
    held: list[object] = [dict(row) for row in islice(cycle(begin), rows)]
    number = {"row_ids": torch.arange(rows), "margins": torch.zeros(rows)}
    truth = dict.fromkeys(("labels", "safe"), torch.arange(rows) % 2 == 0)
    return Batch.of({**{name: _made_up(name, rows) for name in wide}, **number, **truth, "rows": held})


def trace(algorithm: Traceable, batch: Batch) -> Dataflow:
    """The dataflow of an algorithm, by running one `step` over made-up rows.

    Args:
        algorithm: a copy to be thrown away: its roles are bound to the recorder.
        batch: made by `traced_batch`.

    Raises:
        ValueError: the step fails on them.
    """
    roles = algorithm.placed()
    first = next(iter(roles.values()))
    lead = roles.get("actor", first)
    functions = frozenset(name for name, role in roles.items() if not role.following(lead).path)
    again = {n for n, role in roles.items() if isinstance(role, Actor) and role.recompute_log_probs}
    recorder = _Recorder(functions, frozenset(again))
    handles = {n: r.bound(WorkerGroup(n, recorder, ParallelLayout(), (0,))) for n, r in roles.items()}
    algorithm.bind(handles)
    try:
        algorithm.step(batch)
    except Exception as err:
        lacking, unmade = isinstance(err, KeyError | IndexError), isinstance(err, AttributeError)
        raise ValueError(
            f"{type(algorithm).__name__}: its dataflow is read by running `step` once on {len(batch)} "
            f"made-up rows, and that failed: {type(err).__name__}: {str(err).removesuffix('.')}"
            f"{'. Most metrics are missing there, and fields of rows may be: use .get' * lacking}"
            f"{'. `rlhf map` does not run `setup`, and what it makes is missing' * unmade}"
            ". Values and columns of methods of your own are made up there: where `step` needs true ones, "
            "give a run the placement, --strategy.mapping.pools "
            f"'[{{roles: [{', '.join(roles)}], devices: N}}]' or several such pools, or another strategy."
        ) from err
    return dataflow_of(recorder.calls)
