"""Transfer protocols: how the data of one call reach the ranks of a model, and how their results come back.

HybridFlow section 4.1 and Table 3. A protocol is a small frozen object with `distribute` and `collect`; one
of your own subclasses the kind whose result it gives:

    RowTransfer        rows in, rows out        DP (3D_PROTO), MICRO_DP (3D_ALL_MICRO_DP), BROADCAST
    MetricTransfer     rows in, numbers out     DP_METRIC
    EveryRankTransfer  plain values, all ranks  ONE_TO_ALL, ALL_TO_ALL, PP_ONLY (3D_PP_ONLY)
    SingleTransfer     plain value, one rank    RANK_ZERO
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from rlhf_lightning.controller.batch import Batch
from rlhf_lightning.controller.column import Column, Piece
from rlhf_lightning.controller.futures import Gathered, Metrics, Numbers, Value
from rlhf_lightning.controller.parts import PartedColumn
from rlhf_lightning.controller.transport import Submitted
from rlhf_lightning.parallel import ParallelLayout


@runtime_checkable
class ReadsGroups(Protocol):
    """An argument, such as a loss over pairs, that compares neighbouring rows."""

    @property
    def rows_together(self) -> int:
        """Rows of a group of neighbours, which must stay on one rank."""


@dataclass(frozen=True)
class Inputs:
    """Rows and arguments of a call: of the whole call before `distribute`, of one rank after it."""

    batch: Batch
    """The rows; without columns where the method takes none."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the method."""

    @property
    def rows_together(self) -> int:
        """Rows of the largest group that an argument wants on one rank; 1 where none does."""
        wanted = (v.rows_together for v in self.arguments.values() if isinstance(v, ReadsGroups))
        return max(wanted, default=1)


RankInputs = Mapping[int, Inputs]
"""Inputs by rank within the layout; a rank that is absent is not called."""


@dataclass(frozen=True)
class Output:
    """The futures of one rank's call."""

    submitted: Submitted
    num_rows: int
    """Rows that the rank was given, and returns."""

    @property
    def batch(self) -> Batch:
        """The columns that the rank returns, as futures."""
        columns = self.submitted.columns.items()
        return Batch.trusted({name: Column.of(made, self.num_rows) for name, made in columns}, self.num_rows)

    def value(self) -> Value[object]:
        """The plain value that the rank returns, as a future."""
        return Value(self.submitted.report)


Outputs = Mapping[int, Output]
"""Outputs by rank within the layout, of the ranks that were called."""


class Transfer(ABC):
    """How data reach the ranks of a model, and how results come back."""

    @abstractmethod
    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        """Say what each rank is given."""

    @abstractmethod
    def collect(self, layout: ParallelLayout, outputs: Outputs) -> object:
        """Make the controller's result out of the ranks' futures, without fetching them."""


class RowTransfer(Transfer):
    """A protocol whose result is a Batch."""

    @abstractmethod
    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Batch:
        """Join the ranks' rows."""

    def takes_parts(self, inputs: Inputs) -> bool:
        """Whether a batch in parts may become one call per part, since no row's result depends on others."""
        return False


class MetricTransfer(Transfer):
    """A protocol whose result is Metrics."""

    @abstractmethod
    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Metrics:
        """Join the ranks' numbers."""


class EveryRankTransfer(Transfer):
    """A protocol whose result is one plain value a rank; by default every rank gets the same inputs."""

    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        """The same inputs for all."""
        return dict.fromkeys(range(layout.num_ranks), inputs)

    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Gathered[object]:
        """List the ranks' values in the order of the ranks."""
        return Gathered([outputs[rank].value() for rank in sorted(outputs)])


class SingleTransfer(Transfer):
    """A protocol whose result is the plain value of one rank."""

    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Value[object]:
        """Take the one rank's value."""
        return next(iter(outputs.values())).value()


def _rows_by_replica(layout: ParallelLayout, inputs: Inputs) -> RankInputs:
    """Split the rows over the data-parallel replicas; all ranks of a replica get the same rows."""
    parts = inputs.batch.split(layout.d, together=inputs.rows_together)
    shares = [Inputs(part, inputs.arguments) for part in parts]
    return {rank: share for share, ranks in zip(shares, layout.replicas, strict=True) for rank in ranks}


def _joined(outputs: Sequence[Output]) -> Batch:
    """The rows of several ranks, one after the other: as `Batch.joined`, without a batch for each rank."""
    made = [(output.submitted.columns, range(output.num_rows)) for output in outputs]
    columns: dict[str, Column | PartedColumn] = {
        name: Column.of_pieces([Piece(blocks[name], rows) for blocks, rows in made]) for name in made[0][0]
    }
    return Batch.trusted(columns, sum(len(rows) for _, rows in made))


@dataclass(frozen=True)
class DataParallel(RowTransfer):
    """DP: rows are split over the replicas, and columns joined from the output rank of each.

    All ranks of a replica get its rows; the first tensor shard of its last stage returns the result. This is
    3D_PROTO of Table 3, and DP_PROTO where p = t = 1.
    """

    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        """Contiguous rows whose numbers differ by at most one."""
        return _rows_by_replica(layout, inputs)

    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Batch:
        """Join the rows in the order of the replicas."""
        return _joined([outputs[rank] for rank in layout.output_ranks])

    def takes_parts(self, inputs: Inputs) -> bool:
        """Yes, unless an argument, such as an advantage estimator, compares rows."""
        return not any(isinstance(value, ReadsGroups) for value in inputs.arguments.values())


@dataclass(frozen=True)
class MicroDataParallel(RowTransfer):
    """MICRO_DP: rows are split over the generating copies, dg in each replica (Table 3, 3D_ALL_MICRO_DP).

    All ranks of a copy get its rows; the first tensor shard of its first stage returns the result.
    """

    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        """Contiguous rows whose numbers differ by at most one."""
        generating = layout.generating
        parts = inputs.batch.split(generating.num_replicas, together=inputs.rows_together)
        return {r: replace(inputs, batch=parts[generating.replica(r)]) for r in range(layout.num_ranks)}

    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Batch:
        """Join the rows in the order of the copies."""
        return _joined([outputs[rank] for rank in layout.generating.output_ranks])


@dataclass(frozen=True)
class PartOf(RowTransfer):
    """MICRO_DP, but each copy gets only one of the parts into which `Batch.split` divides its rows."""

    index: int
    """Which part, from 0."""
    parts: int
    """Number of parts."""

    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        """The chosen part of each copy's rows."""
        whole = MICRO_DP.distribute(layout, inputs)
        return {r: replace(one, batch=one.batch.split(self.parts)[self.index]) for r, one in whole.items()}

    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Batch:
        """Join the rows in the order of the copies."""
        return MICRO_DP.collect(layout, outputs)


@dataclass(frozen=True)
class Broadcast(RowTransfer):
    """BROADCAST: every rank gets all rows; the first replica's output rank has the result."""

    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        """The same inputs for all."""
        return dict.fromkeys(range(layout.num_ranks), inputs)

    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Batch:
        """The rows of the first replica, whose last stage alone knows what a divided model says."""
        return outputs[layout.output_ranks[0]].batch


@dataclass(frozen=True)
class DataParallelMetric(MetricTransfer):
    """DP_METRIC: rows are split over the replicas, and the replicas' numbers averaged."""

    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        """Contiguous rows whose numbers differ by at most one."""
        return _rows_by_replica(layout, inputs)

    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Metrics:
        """The mean over the output ranks of the replicas."""
        values: list[Value[Numbers]] = [Value(outputs[rank].submitted.report) for rank in layout.output_ranks]
        return Metrics([values])


@dataclass(frozen=True)
class OneToAll(EveryRankTransfer):
    """ONE_TO_ALL: every rank gets the same inputs, and the result has every rank's value."""


@dataclass(frozen=True)
class PipelineOnly(EveryRankTransfer):
    """PP_ONLY: every rank gets the same inputs; the result has one value per stage (Table 3, 3D_PP_ONLY)."""

    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Gathered[object]:
        """List the values of the first tensor shard of the first replica, stage by stage."""
        return Gathered([outputs[rank].value() for rank in layout.groups("p")[0]])


@dataclass(frozen=True)
class AllToAll(EveryRankTransfer):
    """ALL_TO_ALL: each keyword argument is a list with one value per rank; every rank's value is returned."""

    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        """The i-th value of each list for rank i.

        Raises:
            ValueError: an argument is not a list with one value a rank.
        """
        given = inputs.arguments
        wrong = {k: v for k, v in given.items() if not isinstance(v, list) or len(v) != layout.num_ranks}
        if wrong:
            raise ValueError(
                f"ALL_TO_ALL over {layout.num_ranks} ranks: each argument is a list of {layout.num_ranks} "
                f"values; these are not: {sorted(wrong)}."
            )
        lists = {k: v for k, v in given.items() if isinstance(v, list)}
        return {
            rank: replace(inputs, arguments={k: v[rank] for k, v in lists.items()})
            for rank in range(layout.num_ranks)
        }


@dataclass(frozen=True)
class RankZero(SingleTransfer):
    """RANK_ZERO: only rank 0 is called."""

    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        """All inputs for rank 0."""
        return {0: inputs}


ONE_TO_ALL = OneToAll()
ALL_TO_ALL = AllToAll()
RANK_ZERO = RankZero()
PP_ONLY = PipelineOnly()
DP = DataParallel()
MICRO_DP = MicroDataParallel()
BROADCAST = Broadcast()
DP_METRIC = DataParallelMetric()
