"""Plans what the ranks of one micro-DP group exchange to make their generation shard.

Member = stage offset * kt + chunk, where kp = p / pg stages and kt = t / tg chunks make one generation shard.

a slot, kp = 2, kt = 2     layer 3                layer 7           one piece of memory on every member
                         [ chunk 0 | chunk 1 ][ chunk 0 | chunk 1 ]
owners                     0         1          2         3         each member one piece: gathered in place
a norm, not divided      [ whole             ][ whole             ]
owners                     0 and 1              2 and 3             each member one of two: sent pair by pair
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import Literal

from torch import Tensor

from rlhf_lightning.parallel.layout import GenerationLayout
from rlhf_lightning.parallel.sharding import Sharded, holds

How = Literal["nothing", "gather", "broadcast", "pairs"]
"""How the pieces of a slot are exchanged: not at all, in one all-gather, one broadcast each, or pairwise."""


@dataclass(frozen=True)
class Slot:
    """Parameters that share one piece of memory in generation: one, or its counterparts in all stages."""

    params: tuple[Sharded, ...]
    """One parameter; or one per stage, of the same shape and divided alike."""
    owners: tuple[tuple[int, ...], ...]
    """For each piece the members that train it: the chunks of the first parameter, then of the next."""
    members: tuple[int, int]
    """Stages and chunks of the micro-DP group, kp and kt."""
    stored: tuple[int, ...]
    """Shape of a piece in memory: the divided dimension first."""

    @property
    def num_members(self) -> int:
        """Size of the micro-DP group."""
        return prod(self.members)

    @cached_property
    def how(self) -> How:
        """The exchange with the fewest calls that sends no member a piece that it has already."""
        if all(len(owners) == self.num_members for owners in self.owners):
            return "nothing"
        if self.owners == tuple((member,) for member in range(self.num_members)):
            return "gather"
        return "broadcast" if all(len(owners) == 1 for owners in self.owners) else "pairs"

    def own(self, member: int) -> int | None:
        """The piece that a member trains; None where it trains none of them."""
        return next((piece for piece, owners in enumerate(self.owners) if member in owners), None)

    def missing(self, member: int) -> list[int]:
        """The pieces that a member does not train."""
        return [piece for piece, owners in enumerate(self.owners) if member not in owners]

    @cached_property
    def routes(self) -> list[tuple[int, int, int]]:
        """(piece, sender, receiver) of all that is sent, in the same order on all members."""
        return [
            (piece, self._nearest(owners, receiver), receiver)
            for piece, owners in enumerate(self.owners)
            for receiver in range(self.num_members)
            if receiver not in owners
        ]

    def _nearest(self, owners: Sequence[int], member: int) -> int:
        """The owner in the nearest stage, and there the one with the nearest chunk."""
        stage, chunk = divmod(member, self.members[1])

        def distance(owner: int) -> tuple[int, int]:
            return abs(owner // self.members[1] - stage), abs(owner % self.members[1] - chunk)

        return min(owners, key=distance)

    def tensors(self, store: Tensor) -> dict[str, Tensor]:
        """The generation tensors by name: views of the slot's memory, `[pieces, *stored]`."""
        pieces = store.unflatten(0, (len(self.params), -1))
        return {
            param.name: param_of(param, whole.flatten(0, 1))
            for param, whole in zip(self.params, pieces, strict=True)
        }


def stored_as(param: Sharded, tensor: Tensor) -> Tensor:
    """A parameter or a shard as it lies in memory, the divided dimension first: a view."""
    return tensor if param.dim is None else tensor.movedim(param.dim, 0)


def param_of(param: Sharded, stored: Tensor) -> Tensor:
    """The inverse of `stored_as`."""
    return stored if param.dim is None else stored.movedim(0, param.dim)


def buckets(
    params: Sequence[Sharded], stages: Sequence[Sequence[int]], generating: GenerationLayout, *, stage: int
) -> list[list[Slot]]:
    """The slots of one generation stage: a bucket for the n-th layer of each training stage, one for ends.

    Args:
        params: all of the model; its layers have the same ones.
        stages: layers of each training stage.
        generating: under HybridFlow's rule.
        stage: of generation.
    """
    train = generating.train
    members = (train.p // generating.p, train.t // generating.t)
    mine = range(stage * members[0], (stage + 1) * members[0])
    layers = [[[q for q in params if q.place == layer] for layer in stages[s]] for s in mine]
    result = []
    for layer in zip_longest(*layers, fillvalue=[]):
        slots = []
        for counterparts in zip_longest(*layer):
            found = [((s,), param) for s, param in enumerate(counterparts) if param is not None]
            slots.append(_slot(found, members, train.t))
        result.append(slots)
    ends = []
    for param in params:
        at = tuple(s for s, trained in enumerate(mine) if holds(param, stages, trained))
        if at and not isinstance(param.place, int):
            ends.append(_slot([(at, param)], members, train.t))
    # Second: NCCL wants all members in the first call on a group, and what comes last adds to the peak.
    return [*result[:1], ends, *result[1:]]


def _slot(held: Sequence[tuple[tuple[int, ...], Sharded]], members: tuple[int, int], t: int) -> Slot:
    """The slot of a parameter and its counterparts, each with the stages that train it."""
    first, chunks = held[0][1], members[1]
    owners: list[tuple[int, ...]] = []
    for stages, param in held:
        ranks = [tuple(stage * chunks + chunk for stage in stages) for chunk in range(chunks)]
        owners += [sum(ranks, ())] if param.dim is None else ranks
    shape = list(first.shard_shape(t))
    if first.dim is not None:
        shape.insert(0, shape.pop(first.dim))
    return Slot(tuple(param for _, param in held), tuple(owners), members, tuple(shape))
