"""The plan of a transition from training to generation on the same ranks: data, made before anything runs.

train (1, 4, 2), generate (1, 2), 7B, rank 1         rule hybridflow: micro-DP group 0 1
model in quarters       0        1        2        3
training                         ####                     # stays where it is
generation              ++++     ####                     + received, from rank 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from rlhf_lightning.parallel.intervals import Interval, meet, minus
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.parallel.planners import PLANNERS, Overhead, Planner, PlannerName
from rlhf_lightning.parallel.weights import Bytes, Shard, Slice, Weights, exact, total

Distance = tuple[int, int]
"""How far an owner is: stages between, then tensor ranks between."""


@dataclass(frozen=True)
class Receive:
    """What one rank receives from another."""

    source: int
    group: tuple[int, ...]
    """Ranks of the collective."""
    slices: tuple[Slice, ...]
    size_bytes: Bytes

    @classmethod
    def of(cls, source: int, group: Sequence[int], slices: Iterable[Slice]) -> Receive:
        """These slices, their bytes counted."""
        pieces = tuple(slices)
        return cls(source, tuple(group), pieces, total(pieces))

    def joined(self, slices: Sequence[Slice]) -> Receive:
        """The same and these slices."""
        return Receive.of(self.source, self.group, (*self.slices, *slices)) if slices else self


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a transition."""

    rank: int
    keeps: tuple[Slice, ...]
    """Of its generation shard what it trains too, and need not move."""
    receives: tuple[Receive, ...]
    """By source; a planner that gathers everything receives what it drops, too."""
    redundant: tuple[Slice, ...]
    """Of its training shard what it must hold beside the generation shard."""
    sent_bytes: Bytes
    """Counted once for each receiver."""
    received_bytes: Bytes
    peak_bytes: Bytes
    """Of parameters, as the gather ends: what it trains and what it received."""
    redundant_bytes: Bytes

    @property
    def kept_bytes(self) -> Bytes:
        """Of its generation shard what it trains too."""
        return total(self.keeps)


@dataclass(frozen=True)
class ReshardPlan:
    """What every rank keeps, receives and sends."""

    planner: PlannerName
    layout: ParallelLayout
    weights: Weights
    ranks: tuple[RankPlan, ...]

    @property
    def table(self) -> Overhead:
        """What Table 2 of the paper says of the worst rank; parameters that are not divided make it less."""
        return PLANNERS[self.planner].table(self.weights.size_bytes, self.layout)


def reshard(weights: Weights, layout: ParallelLayout, *, planner: PlannerName | None = None) -> ReshardPlan:
    """Plan the transition from the training to the generation shards of a layout.

    A rank receives each byte that it lacks once: of the ranks of the group that train it, from that of the
    nearest stage, and there from the nearest tensor rank.

    Args:
        weights: what is moved.
        layout: of training, with its generation.
        planner: the way to go; that of the generation's rule by default.

    Raises:
        ValueError: the layout does not divide the model, or its generation has another planner's rule.
    """
    chosen = PLANNERS[planner or layout.generating.rule]
    _check(weights, layout, chosen)
    parts: dict[int, RankPlan] = {}
    for group in chosen.groups(layout):
        for part in _plans(weights, layout, chosen, group=group):
            parts[part.rank] = part
    return ReshardPlan(chosen.name, layout, weights, tuple(parts[rank] for rank in range(layout.num_ranks)))


def _plans(
    weights: Weights, layout: ParallelLayout, planner: Planner, *, group: Sequence[int]
) -> Iterator[RankPlan]:
    """The plans of the ranks of one group: each ends with all that the group holds."""
    owned = {rank: planner.training(weights, layout, rank) for rank in group}
    shared = _shared(owned)
    alone = {}  # what a rank alone holds goes to every other
    for rank in group:
        shard = {name: held for name, held in owned[rank].items() if name not in shared}
        alone[rank] = Receive.of(rank, group, weights.slices(shard, flat=planner.flat))
    got: dict[int, list[Receive]] = {}
    for rank in group:
        more = _sources(shared, owned, distances=_distances(layout, group, rank), rank=rank)
        found = [alone[s].joined(weights.slices(more.get(s, {}))) for s in group if s != rank]
        got[rank] = [receive for receive in found if receive.slices]
    sent = sent_by(got.values())
    for rank in group:
        yield _plan(weights, layout, planner, rank=rank, receives=got[rank], sent_bytes=sent.get(rank, 0))


def sent_by(received: Iterable[Iterable[Receive]]) -> dict[int, Bytes]:
    """Bytes that each source gives away, counted once for each receiver.

    Args:
        received: what each receiver gets.
    """
    sent: dict[int, Bytes] = {}
    for receive in chain.from_iterable(received):
        sent[receive.source] = sent.get(receive.source, 0) + receive.size_bytes
    return {source: exact(size) for source, size in sent.items()}


def _shared(owned: Mapping[int, Shard]) -> Shard:
    """Of the parameters of which two ranks hold the same, what all ranks hold."""
    held: dict[str, list[Interval]] = {}
    for shard in owned.values():
        for name, intervals in shard.items():
            held.setdefault(name, []).extend(intervals)
    ordered = {name: sorted(intervals) for name, intervals in held.items()}
    return {
        name: list(dict.fromkeys(intervals))
        for name, intervals in ordered.items()
        if any(before[1] > after[0] for before, after in pairwise(intervals))
    }


def _sources(
    wanted: Shard, owned: Mapping[int, Shard], *, distances: Mapping[int, Distance], rank: int
) -> dict[int, Shard]:
    """What a rank lacks, by the rank that gives it."""
    found: dict[int, Shard] = {}
    near = sorted(owned, key=distances.__getitem__)
    for name, intervals in wanted.items():
        missing = minus(intervals, owned[rank].get(name, ()))
        for source in near:
            given = meet(missing, owned[source].get(name, ()))
            if given:
                found.setdefault(source, {})[name] = given
                missing = minus(missing, given)
    return found


def _distances(layout: ParallelLayout, group: Sequence[int], rank: int) -> dict[int, Distance]:
    at = layout.coordinate(rank)
    places = {other: layout.coordinate(other) for other in group}
    return {other: (abs(place.p - at.p), abs(place.t - at.t)) for other, place in places.items()}


def _plan(
    weights: Weights,
    layout: ParallelLayout,
    planner: Planner,
    *,
    rank: int,
    receives: Sequence[Receive],
    sent_bytes: Bytes,
) -> RankPlan:
    trained = planner.training(weights, layout, rank)
    kept: Shard = {}
    if not planner.flat:
        generated = weights.generation(layout.generating, rank)
        kept = {name: meet(held, generated.get(name, ())) for name, held in trained.items()}
    redundant = {name: minus(held, kept.get(name, ())) for name, held in trained.items()}
    left = tuple(weights.slices(redundant, flat=planner.flat))
    received_bytes = total(receives)
    return RankPlan(
        rank=rank,
        keeps=tuple(weights.slices(kept)),
        receives=tuple(receives),
        redundant=left,
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        peak_bytes=exact(total(weights.slices(trained, flat=planner.flat)) + received_bytes),
        redundant_bytes=total(left),
    )


def _check(weights: Weights, layout: ParallelLayout, planner: Planner) -> None:
    """Refuse what cannot be planned."""
    if len(weights.stages) != layout.p:
        raise ValueError(
            f"reshard: {len(weights.stages)} stages of layers for train p={layout.p}. "
            f"Give the layers of {layout.p} stages, or p={len(weights.stages)}."
        )
    if planner.rule != layout.generating.rule:
        raise ValueError(
            f"reshard(planner={planner.name!r}): the layout groups ranks by the rule "
            f"{layout.generating.rule!r}. Give Generation(rule={planner.rule!r})."
        )
