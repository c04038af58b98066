"""Partial rollouts: which rows come when, by whose weights, and that none is lost, doubled or too old."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning import checkpoint as files
from rlhf_lightning.controller import MICRO_DP, Batch
from rlhf_lightning.controller.register import Method, methods_of
from rlhf_lightning.controller.transfer import Inputs
from rlhf_lightning.engines import GenerationEngine
from rlhf_lightning.engines.prompts import begun
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Colocated, OneStepOff
from rlhf_lightning.workers import Actor, GenerationAhead, PartialGeneration
from rlhf_lightning.workers.ahead import _drawn_again
from rlhf_lightning.workers.in_hand import Carry, InHand
from rlhf_lightning.workers.joining import joined, rows_together

ACTOR = methods_of(Actor)
WIDTH = 40
SAMPLING = Sampling(max_new_tokens=WIDTH)
ID_BITS = (1 << 61) - 1
Lengths = Callable[[int], int]


class Scripted(GenerationEngine):
    """Says the places of its tokens, with the version of the weights as log-probabilities."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths, self.weights, self.steps = lengths, 0, 0
        """Length of the answer to a row id; version of the weights; steps so far."""

    def finished(
        self, rows: TensorDict, *, sampling: Sampling, seed: int, parts: int
    ) -> Iterator[tuple[Tensor, TensorDict]]:
        """See `GenerationEngine.finished`; all at once."""
        said = self.resume(rows, sampling=sampling, seed=seed, pause=lambda _: False)
        yield torch.arange(len(rows)), said

    def resume(
        self,
        rows: TensorDict,
        *,
        sampling: Sampling,
        seed: int,
        pause: Callable[[Tensor], bool],
        at_once: int = 0,
    ) -> TensorDict:
        """See `GenerationEngine.resume`; refuses prompts that have lost a token of `rows_of` or got one."""
        assert rows["prompt_mask"].sum(1).equal(1 + ((rows["row_ids"] & ID_BITS) % 1000 == 0))
        assert rows["prompt_mask"][:, -1].all()
        rows = begun(rows, width=sampling.max_new_tokens)
        said = rows.select("response_ids", "response_mask", "log_probs", "ended").clone()
        wanted = torch.tensor([self.lengths(row) for row in rows["row_ids"].tolist()], dtype=torch.int64)
        while not pause(said["ended"]) and not said["ended"].all():
            self.steps += 1
            for row in (~said["ended"]).nonzero()[: at_once or None, 0].tolist():
                place = int(said["response_mask"][row].sum())
                said["response_ids"][row, place] = place
                said["response_mask"][row, place] = True
                said["log_probs"][row, place] = -float(self.weights)
                said["ended"][row] = place + 1 == wanted[row]
        return said


@dataclass
class Replicas:
    """A group of workers that generate, each with rows in hand."""

    layout: ParallelLayout
    lengths: Lengths
    version: int = 0

    def __post_init__(self) -> None:
        self.engines = [Scripted(self.lengths) for _ in range(self.layout.d)]
        self.hands = [InHand() for _ in range(self.layout.d)]

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        if batch is None:
            self.version += 1
            for engine in self.engines:
                engine.weights = self.version
            return None
        carry = arguments.get("carry", Carry(version=0, max_staleness=1))
        assert isinstance(carry, Carry)
        wanted = batch.select([name for name in batch if name in (method.reads or ())])
        shares = MICRO_DP.distribute(self.layout, _asking(wanted, carry))
        found = [self._run(method, rank, share.batch, carry) for rank, share in shares.items()]
        return Batch.joined(found) if method.returns else None

    def _run(self, method: Method, rank: int, share: Batch, carry: Carry) -> Batch:
        rows = TensorDict({name: share[name] for name in share}, batch_size=[len(share)])
        if method.name == "generate_sequences":
            found = self.engines[rank].generate(rows, sampling=SAMPLING, seed=0)
        else:
            self.hands[rank].add(rows, width=WIDTH)
            if method.name == "hold_sequences":
                return share
            found = self.hands[rank].answer(
                self.engines[rank], size=len(share), carry=carry, sampling=SAMPLING, seed=0
            )
            assert found["row_numbers"].diff().gt(0).all(), "in the order of their numbers"
        found = Actor(path="embedded").completed(found)
        return Batch.of({name: found[name] for name in method.returns})


def _asking(batch: Batch, carry: Carry) -> Inputs:
    return Inputs(batch, {"carry": carry})


@dataclass
class Silent:
    """Workers of the actor, which are told nothing that matters here."""

    calls: list[str] = field(default_factory=list)

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        self.calls.append(method.name)
        return None


def rows_of(iteration: int, *, size: int, together: int) -> Batch:
    """Rows whose other columns say who they are; prompts of every iteration have another width."""
    ids = torch.arange(size) + 1000 * iteration
    prompts = torch.zeros(size, 2 + iteration % 3, dtype=torch.int64)
    prompts[:, -1], prompts[0, 0] = ids, 1
    columns = {
        "row_ids": ids,
        "prompt_ids": prompts,
        "prompt_mask": prompts > 0,
        "group_ids": ids // together,
    }
    return Batch.of({**columns, "rows": [{"id": int(row)} for row in ids]})


def uneven(row: int) -> int:
    """1 to 40 tokens, most of them few."""
    draw = ((row & ID_BITS) * 2654435761 + (row >> 61) * 97) % 1009 / 1009
    return 1 + int((WIDTH - 1) * draw**4)


def iterations(
    generation: GenerationAhead | PartialGeneration, count: int, *, size: int, together: int, first: int = 1
) -> Iterator[Batch]:
    """What an algorithm is given: it asks for answers, and learns."""
    for number in range(first, first + count):
        batch = rows_of(number, size=size, together=together)
        generation.end_step()
        found = generation.call(ACTOR["generate_sequences"], batch, {})
        assert isinstance(found, Batch)
        yield found
        generation.call(ACTOR["update_actor"], found, {})


def partial(replicas: Replicas, max_staleness: int) -> PartialGeneration:
    return PartialGeneration(Silent(), replicas, recompute_log_probs=False, max_staleness=max_staleness)


def generation(max_staleness: int) -> GenerationAhead | PartialGeneration:
    replicas = Replicas(ParallelLayout(), uneven)
    if max_staleness == 1:
        return GenerationAhead(Silent(), replicas, recompute_log_probs=False)
    return partial(replicas, max_staleness)


def test_turns_are_refused() -> None:
    given = {"environment": Environment(function="a_module.speaks")}
    generation = partial(Replicas(ParallelLayout(), uneven), 2)
    with pytest.raises(ValueError, match=r"Try --strategy openrlhf, or one-step-off with"):
        generation.call(ACTOR["generate_sequences"], rows_of(1, size=2, together=1), given)


@pytest.mark.parametrize(("size", "together", "d"), [(6, 1, 1), (8, 2, 1), (7, 1, 3), (12, 4, 2), (2, 1, 3)])
@pytest.mark.parametrize("max_staleness", [2, 3, 5])
def test_no_row_is_lost_doubled_torn_from_its_group_or_too_old(
    max_staleness: int, size: int, together: int, d: int
) -> None:
    replicas = Replicas(ParallelLayout(d=d), uneven)
    generation = partial(replicas, max_staleness)
    seen: list[int] = []
    oldest: list[int] = []
    carried = 0
    for found in iterations(generation, 30, size=size, together=together):
        ids = found["row_ids"].tolist()
        seen += ids
        assert len(found) == size
        # All of it is the row's own.
        real = [row & ID_BITS for row in ids]
        assert found["prompt_ids"][:, -1].tolist() == real
        assert found["prompt_mask"].any(0)[0]
        assert found.objects("rows") == [{"id": row} for row in real]
        lengths = found["response_mask"].sum(1)
        assert lengths.tolist() == [uneven(row) for row in ids] == found["num_tokens"].tolist()
        groups = [(row // together, row >> 61) for row in ids]
        assert all(len(set(groups[n : n + together])) == 1 for n in range(0, size, together))
        # Each token's log-probability is of the weights that the columns name.
        versions = (-found["log_probs"]).where(found["response_mask"], torch.inf)
        assert versions.amin(1).equal(found["weights_version"].float())
        last = (-found["log_probs"]).amax(1)
        assert last.equal(found["last_version"].float())
        older = (versions < last[:, None]).sum(1)
        assert older.equal(found["older_tokens"])
        oldest.append(replicas.version - int(found["weights_version"].min()))
        numbers = generation.metrics()
        assert numbers["response/staleness"] == oldest[-1]
        assert numbers["response/carried"] == pytest.approx(float((older > 0).float().mean()))
        assert numbers["response/carried_tokens"] == pytest.approx(float(older.sum() / lengths.sum()))
        carried += int((older > 0).sum())
    assert len(seen) == len(set(seen)) == 30 * size
    assert (carried > 0) == (size // together > d)  # where one row is all, it is waited for
    assert max(oldest) <= max_staleness
    assert generation.in_flight is not None
    waiting = generation.in_flight["row_ids"].tolist()
    assert len(waiting) == 2 * size
    every = {
        row
        for number in range(1, 31)
        for row in rows_of(number, size=size, together=together)["row_ids"].tolist()
    }
    assert every == {row for row in (*seen, *waiting) if row <= ID_BITS}
    # Those that were drawn again at the start came once each; and nobody waits for long.
    assert min(row & ID_BITS for row in waiting if row <= ID_BITS) // 1000 >= 30 - max_staleness - 2


def test_the_bound_is_reached_and_waited_for() -> None:
    """One answer a batch is longer than those of three others together."""

    def lengths(row: int) -> int:
        return 39 if row % 1000 == 0 else 9

    replicas = Replicas(ParallelLayout(), lengths)
    oldest, steps = [], []
    for found in iterations(partial(replicas, 2), 12, size=4, together=1):
        oldest.append(replicas.version - int(found["weights_version"].min()))
        steps.append(replicas.engines[0].steps)
    assert max(oldest) == 2
    assert steps[-1] - steps[-2] < 39


def test_where_all_end_at_once_it_is_one_batch_ahead() -> None:
    names = ("row_ids", "prompt_ids", "prompt_mask", "log_probs", "response_mask", "weights_version")

    def all_of(generation: GenerationAhead | PartialGeneration) -> list[list[object]]:
        return [
            [*(found[name].tolist() for name in names), generation.metrics()["response/staleness"]]
            for found in iterations(generation, 6, size=5, together=1)
        ]

    def same(_: int) -> int:
        return 7

    ahead = GenerationAhead(Silent(), Replicas(ParallelLayout(d=2), same), recompute_log_probs=False)
    assert all_of(partial(Replicas(ParallelLayout(d=2), same), 3)) == all_of(ahead)


def test_the_generator_decodes_less_than_if_it_waited_for_the_longest() -> None:
    waiting, carrying = (Replicas(ParallelLayout(), uneven) for _ in range(2))
    ahead = GenerationAhead(Silent(), waiting, recompute_log_probs=False)
    list(iterations(ahead, 20, size=8, together=1))
    list(iterations(partial(carrying, 4), 20, size=8, together=1))
    assert carrying.engines[0].steps < 0.7 * waiting.engines[0].steps


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize(("saved", "max_staleness"), [(1, 1), (2, 2), (1, 2)])
def test_what_was_in_flight_is_answered_first(saved: int, max_staleness: int, steps: int) -> None:
    before, after = generation(saved), generation(max_staleness)
    first = iterations(before, steps, size=6, together=1)
    seen = [row for found in first for row in found["row_ids"].tolist()]
    after.in_flight = before.in_flight
    for number, found in enumerate(iterations(after, 6, size=6, together=1, first=steps + 1)):
        ids = found["row_ids"].tolist()
        assert found["response_mask"].sum(1).tolist() == [uneven(row) for row in ids]
        assert (after.metrics()["response/staleness"] > 0) == (number > 0)
        seen += ids
    assert len(seen) == len(set(seen)) == (steps + 6) * 6
    assert {1000 * batch + row for batch in (1, steps, steps + 1) for row in range(6)} <= set(seen)
    wrong = generation(max_staleness)
    wrong.in_flight = rows_of(1, size=3, together=1)
    with pytest.raises(ValueError, match="3 rows in flight, and a batch has 6"):
        next(iterations(wrong, 1, size=6, together=1))
    wrong = generation(max_staleness)
    wrong.in_flight = rows_of(1, size=6, together=2)
    with pytest.raises(
        ValueError, match=r"2 answers to each, and a batch has 1 to each\. .*algo\.group_size"
    ):
        next(iterations(wrong, 1, size=6, together=1))


def test_what_was_in_flight_keeps_its_order() -> None:
    generation = partial(Replicas(ParallelLayout(), lambda _: 7), 2)
    flying = joined([rows_of(number, size=4, together=1) for number in (1, 2)])
    generation.in_flight = flying
    found = iterations(generation, 2, size=4, together=1, first=3)
    assert [row for batch in found for row in batch["row_ids"].tolist()] == flying["row_ids"].tolist()


def test_answers_drawn_again_are_groups_of_their_own() -> None:
    batch = rows_of(1, size=4, together=2)
    again = _drawn_again(batch, 2)
    assert not set(batch["group_ids"].tolist()) & set(again["group_ids"].tolist())
    assert rows_together(joined([again.take([2, 3]), batch.take([2, 3])])) == 2


def test_rows_without_groups_are_handed_on_one_by_one() -> None:
    """As PPO's are."""
    generation, batch = partial(Replicas(ParallelLayout(), uneven), 2), rows_of(1, size=4, together=1)
    alone = batch.select([name for name in batch if name != "group_ids"])
    found = generation.call(ACTOR["generate_sequences"], alone, {})
    assert isinstance(found, Batch)
    assert len(found) == 4


def test_batches_of_another_size_are_refused() -> None:
    generation = partial(Replicas(ParallelLayout(), uneven), 2)
    next(iterations(generation, 1, size=6, together=1))
    with pytest.raises(ValueError, match="a batch of 2 rows follows one of 6"):
        next(iterations(generation, 1, size=2, together=1))


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_checkpoint_has_the_prompts_in_flight_if_it_can_hold_them(
    max_staleness: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, rows = OneStepOff(max_staleness=max_staleness), rows_of(3, size=4, together=1)
    strategy.generation = generation(max_staleness)
    strategy.generation.in_flight = rows
    strategy.save_checkpoint({"epoch": 7}, tmp_path / "a.ckpt")
    state = files.read_state(tmp_path / "a.ckpt")
    assert state["max_staleness"] == max_staleness
    kept = state["in_flight"]
    assert isinstance(kept, dict)
    again = Batch.of(kept)
    assert again["prompt_ids"].equal(rows["prompt_ids"])
    assert again.objects("rows") == rows.objects("rows")
    strategy.restore_in_flight(kept)
    assert strategy._restored is not None
    assert len(strategy._restored) == 4
    Colocated().restore_in_flight({})
    assert not caplog.records
    Colocated().restore_in_flight(kept)
    assert "4 answers were under way when the checkpoint was made" in caplog.text
    strategy.generation.in_flight = rows | {"rows": [{"day": date(2026, 1, 1)}] * 4}
    strategy.save_checkpoint({"epoch": 8}, tmp_path / "b.ckpt")
    state = files.read_state(tmp_path / "b.ckpt")
    assert state["epoch"] == 8
    assert not state["in_flight"]
    assert "left out of it" in caplog.text


def test_no_staleness_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_staleness=0: .*Try 1, or --strategy openrlhf"):
        OneStepOff(max_staleness=0)
