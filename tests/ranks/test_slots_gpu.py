"""On a GPU the host hands over a step before it knows who ended in the last; here on a pretended one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import cast
from weakref import ref

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.engines import FSDPEngine, Native, NativeGenerator
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.native import cuda_graphs
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.engines.native.cuda_graphs import GraphedSteps
from rlhf_lightning.engines.native.slots_gpu import GPUSlots
from rlhf_lightning.spec import Sampling
from tests.unit.engines import tiny
from tests.unit.engines.decoders import agree
from tests.unit.pretended import GPU, Stream, pretended

CPU = torch.device("cpu")
ROWS, WIDTH, SLOTS = 40, 12, 20
ENDING = Sampling(max_new_tokens=WIDTH, stop_token_ids=tuple(range(3, 12)))
SAMPLINGS = {
    "ends": ENDING,
    "nucleus": Sampling(max_new_tokens=WIDTH, stop_token_ids=tuple(range(3, 12)), top_p=0.9),
    "never": Sampling(max_new_tokens=WIDTH),
    "texts": Sampling(max_new_tokens=WIDTH, stop_strings=tuple("!'05")),
}
CONFIGS = {"at once": Native(), "slots": Native(slots=SLOTS), "refilled": Native(slots=SLOTS, refill=1)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_causal(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few rows need several."""
    monkeypatch.setattr(cuda_graphs, "_FEWEST", 8)


def rows() -> TensorDict:
    """Prompts of 1 to `tiny.PROMPT` tokens."""
    ids = torch.randint(12, 89, (ROWS, tiny.PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(tiny.PROMPT) >= torch.arange(ROWS)[:, None] % tiny.PROMPT
    columns = {"prompt_ids": ids, "prompt_mask": mask, "row_ids": torch.arange(ROWS)}
    return TensorDict(columns, batch_size=ROWS)


@contextmanager
def generating(model: Path, device: torch.device, config: Native) -> Iterator[NativeGenerator]:
    ends = Ends(pad_token_id=0, eos_token_ids=(), tokenizer=load_tokenizer("embedded"))
    with pretended(), FSDPEngine(tiny.spec(model), device=device).generating() as decoder:
        yield NativeGenerator(decoder, device=device, ends=ends, config=config)


@pytest.mark.parametrize(
    ("slots", "ends"),
    [
        *(("at once", ends) for ends in SAMPLINGS),
        ("slots", "ends"), ("slots", "texts"), ("refilled", "ends"), ("refilled", "nucleus"),
    ],
)  # fmt: skip
def test_slots_that_are_left_behind_change_no_answer(model: Path, slots: str, ends: str) -> None:
    config, sampling = CONFIGS[slots], SAMPLINGS[ends]
    answers = []
    for device in (CPU, GPU):
        with generating(model, device, config) as native:
            parts = list(native.finished(rows(), sampling=sampling, seed=5, parts=3))
        order = torch.cat([which for which, _ in parts]).argsort()
        assert torch.equal(order.sort().values, torch.arange(ROWS))
        answers.append(cast(TensorDict, TensorDict.cat([said for _, said in parts])[order]))
    agree(answers[1], answers[0])
    lengths = answers[0]["response_mask"].sum(1)
    assert (len(set(lengths.tolist())) > 3) == (sampling is not SAMPLINGS["never"])


@pytest.mark.parametrize("slots", ["at once", "refilled"])
def test_a_pause_is_where_a_cpu_pauses(model: Path, slots: str) -> None:
    config = CONFIGS[slots]
    answers, told = list[TensorDict](), list[list[int]]()
    for device in (CPU, GPU):
        with generating(model, device, config) as native:
            said = rows()
            for enough in (5, 11, ROWS):
                told.append([])

                def pause(ended: Tensor, enough: int = enough, counts: list[int] = told[-1]) -> bool:
                    counts.append(int(ended.sum()))
                    return counts[-1] >= enough

                more = native.resume(said, sampling=ENDING, seed=5, pause=pause)
                said = TensorDict({**said, **more}, batch_size=ROWS)
                answers.append(said)
    assert told[:3] == told[3:]
    for here, there in zip(answers[:3], answers[3:], strict=True):
        agree(there, here)
        assert torch.equal(there["ended"], here["ended"])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host asked a GPU to do, in order: steps of so many rows, moves, and waiting for it."""
    notes: list[str] = []
    monkeypatch.setattr(Stream, "told", notes)
    step, move = GraphedSteps.__call__, Cache.move

    def stepped(self: GraphedSteps, compute: Callable[[int], Tensor | None], count: int) -> Tensor | None:
        notes.append(f"step of {self.rows(count)}")
        return step(self, compute, count)

    def moved(self: Cache, source: Tensor, target: Tensor, length: int) -> None:
        notes.append("move")
        move(self, source, target, length)

    monkeypatch.setattr(GraphedSteps, "__call__", stepped)
    monkeypatch.setattr(Cache, "move", moved)
    return notes


def test_a_step_is_handed_over_before_the_last_is_looked_at(model: Path, told: list[str]) -> None:
    with generating(model, GPU, Native()) as native:
        native.generate(rows(), sampling=ENDING, seed=5)
    asked = [note for note in told if note in {"record_event", "synchronize"}]
    waits = [number for number, note in enumerate(asked) if note == "synchronize"]
    assert asked[:2] == ["record_event"] * 2  # the prompts, and the first step
    assert len(waits) >= asked.count("record_event") - 1  # what is looked at has arrived
    assert all(asked[:number].count("record_event") - index == 2 for index, number in enumerate(waits[:-1]))


def test_rows_move_where_a_smaller_graph_can_take_them(model: Path, told: list[str]) -> None:
    with generating(model, GPU, Native()) as native:
        said = native.generate(rows(), sampling=ENDING, seed=5)
    steps = [int(note.removeprefix("step of ")) for note in told if note.startswith("step")]
    assert steps == sorted(steps, reverse=True)
    assert {40, 32, 16, 8} >= set(steps)
    assert len(set(steps)) > 2
    shrunk = sum(before > after for before, after in pairwise(steps))
    assert told.count("move") <= shrunk < len(set(said["response_mask"].sum(1).tolist()))


@pytest.mark.parametrize(("name", "within"), [("ends", True), ("texts", False), ("nucleus", False)])
def test_a_graph_draws_where_the_host_does_not_look(
    model: Path, name: str, *, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    step, draw = GPUSlots._step, GPUSlots._draw

    def stepped(self: GPUSlots, size: int) -> Tensor | None:
        notes.append("begins")
        logits = step(self, size)
        notes.append("ends")
        return logits

    def drawn(self: GPUSlots, logits: Tensor | None, state: Tensor) -> None:
        notes.append("draws")
        draw(self, logits, state)

    monkeypatch.setattr(GPUSlots, "_step", stepped)
    monkeypatch.setattr(GPUSlots, "_draw", drawn)
    with generating(model, GPU, Native()) as native:
        native.generate(rows(), sampling=SAMPLINGS[name], seed=5)
    order = ["begins", "draws", "ends"] if within else ["begins", "ends", "draws"]
    assert notes[0] == "draws"  # the first tokens
    assert len(notes) > 3
    assert notes[1:] == order * (len(notes) // 3)


def test_no_step_follows_the_last_that_any_row_can_have(model: Path, told: list[str]) -> None:
    with generating(model, GPU, Native()) as native:
        native.generate(rows(), sampling=SAMPLINGS["never"], seed=5)
    assert sum(note.startswith("step") for note in told) == WIDTH - 1


@pytest.mark.parametrize("sampling", [ENDING, SAMPLINGS["nucleus"]], ids=["within", "behind"])
def test_slots_that_nobody_has_are_computed_over_one_place(
    model: Path, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[tuple[int, Tensor]] = []
    step = GPUSlots._step

    def noted(self: GPUSlots, size: int) -> Tensor | None:
        fed.append((len(self.occupants), self.state[2].clone()))
        return step(self, size)

    monkeypatch.setattr(GPUSlots, "_step", noted)
    with generating(model, GPU, Native()) as native:
        said = native.generate(rows(), sampling=sampling, seed=5)
    lengths = said["response_mask"].sum(1)
    assert len({count for count, _ in fed}) > 1
    for number, (count, places) in enumerate(fed, start=1):
        assert int((places[:count] > 0).sum()) == int((lengths > number).sum())
        assert not places[count:].any()


def test_keys_and_values_are_freed_with_the_generation(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when Python next looks for cycles: an update needs the memory."""
    caches: list[ref[Cache]] = []
    make = Cache.__init__

    def noted(self: Cache, slots: int, capacity: int, *, dtype: torch.dtype | None) -> None:
        make(self, slots, capacity, dtype=dtype)
        caches.append(ref(self))

    monkeypatch.setattr(Cache, "__init__", noted)
    with generating(model, GPU, Native()) as native:
        gc.disable()
        try:
            native.generate(rows(), sampling=ENDING, seed=5)
            assert [cache() for cache in caches] == [None]
        finally:
            gc.enable()
