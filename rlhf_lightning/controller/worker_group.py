"""The ranks of one model on the devices of one pool: splits a call, sends it, joins the futures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rlhf_lightning.controller.batch import Batch
from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.call import Call, ColumnInput
from rlhf_lightning.controller.errors import WorkerError
from rlhf_lightning.controller.groups import check_neighbours
from rlhf_lightning.controller.register import Method
from rlhf_lightning.controller.transfer import Inputs, Output, Outputs, RowTransfer
from rlhf_lightning.controller.transport import Future, Transport
from rlhf_lightning.field_types import check_names
from rlhf_lightning.parallel import ParallelLayout, Scope

INLINE_BYTES = 100_000
"""A smaller block of the controller's own travels with the call, not through the object store."""

_GIVEN = ("prompt_ids", "prompt_mask", "row_ids", "rows")
"""Columns that no call makes; a step that lacks one has not taken it along."""


@runtime_checkable
class ReadsColumns(Protocol):
    """An argument, such as a loss, that names the columns it reads."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of columns."""


@runtime_checkable
class MakesColumns(Protocol):
    """An argument, such as an advantage estimator, that names the columns which the call returns."""

    @property
    def returns(self) -> tuple[str, ...]:
        """Names of columns."""


@dataclass(frozen=True)
class WorkerGroup:
    """One model spread over devices."""

    role: str
    """Name of the role, as errors and metrics call it."""
    transport: Transport
    layout: ParallelLayout
    devices: tuple[int, ...]
    """Global rank of the device behind each rank of the layout."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """Run a method on the workers and return its futures at once.

        A batch in parts becomes one call per part, without waiting for any, where the protocol allows it.

        Raises:
            ValueError: the batch lacks a column that the method reads.
            WorkerError: the run is over.
        """
        if self.transport.closed:
            raise WorkerError(
                f"{self.role}.{method.name}: the run is over, and its devices went with it. Call it inside "
                "trainer.fit, validate or predict, by the algorithm's own field."
            )
        rows = Batch({}, num_rows=0) if batch is None else self._read(method, batch, arguments)
        inputs, transfer, parts = Inputs(rows, arguments), method.transfer, rows.parts
        if parts is None or not isinstance(transfer, RowTransfer) or not transfer.takes_parts(inputs):
            return transfer.collect(self.layout, self._outputs(method, inputs))
        each = [Inputs(rows.part(index), arguments) for index in range(len(parts.numbers))]
        found = [transfer.collect(self.layout, self._outputs(method, part, scope="part")) for part in each]
        return Batch.in_parts(parts, found)

    def _outputs(self, method: Method, inputs: Inputs, *, scope: Scope = "all") -> Outputs:
        shards = method.transfer.distribute(self.layout, inputs)
        scope = "some" if len(shards) < self.layout.num_ranks else scope
        returns = method.returns
        if not returns and isinstance(method.transfer, RowTransfer):
            returns = _made(inputs.arguments)
        outputs: dict[int, Output] = {}
        for rank, share in shards.items():
            rows, (columns, blocks) = len(share.batch), _shipped(share.batch)
            call = Call(self.role, method.name, rank, rows, columns, share.arguments, returns, scope)
            outputs[rank] = Output(self.transport.submit(self.devices[rank], call, blocks), rows)
        return outputs

    def _read(self, method: Method, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        names = list(dict.fromkeys((*(method.reads or ()), *_read_by(arguments))))
        missing = [name for name in names if name not in batch]
        if missing:
            advice = "Call what makes them first."
            if left := [repr(name) for name in missing if name in _GIVEN]:
                advice = f"The data gives {' and '.join(left)}: batch.select([..., {', '.join(left)}])."
            raise ValueError(
                f"{self.role}.{method.name} reads the columns {names}, and the batch has no {missing}: "
                f"it has {sorted(batch)}. {advice}"
            )
        check_neighbours(f"{self.role}.{method.name}", batch, Inputs(batch, arguments).rows_together)
        return self._shared(batch if method.reads is None else batch.select(names), method)

    def _shared(self, batch: Batch, method: Method) -> Batch:
        """Put large blocks of this process into the object store once, instead of for each call and rank."""
        try:
            return batch.with_sources(
                lambda block: self.transport.shared(block) if block.size_bytes > INLINE_BYTES else block
            )
        except WorkerError as err:
            raise WorkerError(f"{self.role}.{method.name}: {err}") from None


def _shipped(batch: Batch) -> tuple[tuple[ColumnInput, ...], list[Future | Block]]:
    """How a device assembles these rows, and the blocks of which it does."""
    columns: list[ColumnInput] = []
    blocks: list[Future | Block] = []
    for name in batch:
        column = batch.column(name)
        rows = [piece.shipped() for piece in column.pieces]
        by = [] if column.by is None else [piece.shipped() for piece in column.by.pieces]
        blocks += [source for source, _ in rows + by]
        columns.append(ColumnInput(name, tuple([pick for _, pick in rows]), tuple([pick for _, pick in by])))
    return tuple(columns), blocks


def _read_by(arguments: Mapping[str, object]) -> Iterator[str]:
    """The columns that arguments, such as a loss, read."""
    for value in arguments.values():
        if isinstance(value, ReadsColumns):
            check_names(type(value).__name__, "columns", value.columns)
            yield from value.columns


def _made(arguments: Mapping[str, object]) -> tuple[str, ...]:
    """The columns that a call returns according to its arguments; none where no argument says so."""
    return next((value.returns for value in arguments.values() if isinstance(value, MakesColumns)), ())
