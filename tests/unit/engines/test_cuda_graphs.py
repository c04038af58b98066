"""Steps of a GPU that are captured and replayed, here without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlhf_lightning.engines.native import cuda_graphs
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.engines.native.cuda_graphs import GraphCapture, GraphedSteps
from rlhf_lightning.engines.native.kv import Cached
from rlhf_lightning.engines.native.kv_gpu import GPUDecode


class Counting:
    """A decoder whose logits are what it was fed, and which notes how many rows it computed."""

    capturable = True

    def __init__(self, kind: str = "counting") -> None:
        self.sizes: list[int] = []
        self._config: PreTrainedConfig = type("Named", (PreTrainedConfig,), {"model_type": kind})()

    def __call__(self, ids: Tensor, places: Tensor, sequences: Cached) -> Tensor:
        assert isinstance(sequences, GPUDecode)
        self.sizes.append(len(ids))
        return torch.stack([ids, places], -1).float()

    @property
    def config(self) -> PreTrainedConfig:
        return self._config


SLOTS = 100


def steps(decoder: Counting) -> tuple[Callable[[int], Tensor | None], Tensor, Tensor]:
    places, tokens, cache = torch.arange(SLOTS), torch.arange(SLOTS) + 1000, Cache(SLOTS, 4)

    def compute(size: int) -> Tensor | None:
        place = places[:size]
        return decoder(tokens[:size], place, GPUDecode(cache, place))

    graphed = GraphedSteps(decoder, slots=SLOTS, device=torch.device("cpu"))  # type: ignore[arg-type]
    return partial(graphed, compute), places, tokens


def test_steps_are_recorded_by_size_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, records = Counting(), []

    def recorded(_: GraphCapture, compute: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
        records.append(compute)
        return compute

    monkeypatch.setattr(GraphCapture, "capture", recorded)
    step, places, tokens = steps(decoder)
    for count in (100, 65, 64, 33, 9, 8, 3, 1, 2):
        logits = step(count)
        assert logits is not None
        assert torch.equal(logits, torch.stack([tokens[:count], places[:count]], -1).float())
        places += 1
    assert decoder.sizes == [100, 100, 64, 64, 32, 32, 32, 32, 32]
    assert len(records) == 3


def refused(decoder: Counting, message: str) -> None:
    """Three steps of 5 rows, the second of which is not recorded, and says why."""
    step, _, _ = steps(decoder)
    step(5)
    with pytest.warns(UserWarning, match=message):
        step(5)
    step(5)
    assert decoder.sizes == [32, 32, 5]


def sizes_in_the_next_generation(decoder: Counting) -> list[int]:
    later, _, _ = steps(decoder)
    for _ in range(3):
        later(5)
    return decoder.sizes[3:]


def test_steps_that_cannot_be_recorded_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Counting("unrecordable")

    def refuse(_: GraphCapture, __: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(GraphCapture, "capture", refuse)
    monkeypatch.setattr(cuda_graphs, "_not_capturable", set())
    refused(decoder, "steps of unrecordable cannot be captured.*not permitted")
    assert sizes_in_the_next_generation(decoder) == [5, 5, 5]
    refused(Counting("other"), "steps of other")


@pytest.mark.parametrize("torn", [False, True])
def test_steps_for_which_no_memory_was_left_are_captured_in_the_next_generation(
    monkeypatch: pytest.MonkeyPatch, *, torn: bool
) -> None:
    decoder = Counting()

    def refuse(_: GraphCapture, __: object) -> None:
        try:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        finally:
            if torn:
                raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(GraphCapture, "capture", refuse)
    refused(decoder, "no memory was left to capture decoding steps of counting")
    monkeypatch.setattr(GraphCapture, "capture", lambda _, compute: compute)
    assert sizes_in_the_next_generation(decoder) == [32, 32, 32]


def test_ranks_that_wait_for_others_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Counting()
    decoder.capturable = False
    monkeypatch.setattr(GraphCapture, "capture", None)
    step, _, _ = steps(decoder)
    for _ in range(3):
        step(5)
    assert decoder.sizes == [5, 5, 5]


class Graph:
    """Notes what is asked of it; `refuses` says whether its recording fails."""

    notes: ClassVar[list[object]] = []
    refuses: ClassVar[bool] = False

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self.notes.append((pool, capture_error_mode))

    def capture_end(self) -> None:
        self.notes.append("end")
        if self.refuses:
            raise RuntimeError("operation failed due to a previous error during capture")

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self.notes.append("replay")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What recorders ask of a GPU."""

    @contextmanager
    def stream(_: object) -> Iterator[None]:
        Graph.notes.append("aside")
        try:
            yield
        finally:
            Graph.notes.append("back")

    monkeypatch.setattr(Graph, "notes", [])
    fakes = {"CUDAGraph": Graph, "Stream": lambda _: None, "stream": stream}
    said = {name: lambda *_, name=name: Graph.notes.append(name) for name in ("synchronize", "empty_cache")}
    for name, fake in (fakes | said).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return Graph.notes


def test_recordings_share_memory_that_is_cleared_before_the_first(graphs: list[object]) -> None:
    capture, output = GraphCapture(torch.device("cuda", 7)), torch.ones(2)
    replay = capture.capture(lambda: output)
    assert graphs == ["synchronize", "empty_cache", "aside", (None, "thread_local"), "end", "back"]
    graphs.clear()
    capture.capture(lambda: None)
    assert graphs == ["synchronize", "aside", ("pool", "thread_local"), "end", "back"]
    graphs.clear()
    assert replay() is output
    assert graphs == ["replay"]


def test_a_recording_that_fails_comes_back_to_its_stream(
    graphs: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "refuses", True)

    def asks() -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error during capture"):
        GraphCapture(torch.device("cuda", 7)).capture(asks)
    assert graphs[-2:] == ["end", "back"]
