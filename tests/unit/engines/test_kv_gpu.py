"""What a GPU computes a step with, here on a CPU: flash attention, and replayed steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlhf_lightning.engines.native import cuda_graphs, kv_gpu
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.engines.native.cuda_graphs import GraphCapture, GraphedSteps
from rlhf_lightning.engines.native.decoder import Output, logits_of
from rlhf_lightning.engines.native.kv import Cached, Decode, Prefill
from rlhf_lightning.engines.native.kv_gpu import GPUDecode
from rlhf_lightning.engines.packed import attention, flash
from rlhf_lightning.engines.packed.attention import Packed
from rlhf_lightning.engines.packed.flash import Spans
from rlhf_lightning.engines.packed.layer import Layer
from tests.unit.engines.varlen import plain
from tests.unit.pretended import GPU, pretended

CAPACITY, WINDOW, SIZE = 12, 4, 8
GROUPS = ((1, 4), (2, 2), (4, 1))
"""Heads with a key, and queries of each."""


@pytest.fixture
def flashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention for everyone."""
    monkeypatch.setattr(flash, "varlen_attn", plain)
    for module in (attention, kv_gpu):
        monkeypatch.setattr(module, "has_flash_attention", lambda *_: True)


class Turn(NamedTuple):
    """Queries, keys and values of some tokens."""

    query: Tensor
    """[n, K, G, D]."""
    key: Tensor
    value: Tensor


def turn(count: int, heads: int, group: int) -> Turn:
    shape = count, heads, SIZE
    return Turn(torch.randn(count, heads, group, SIZE), torch.randn(shape), torch.randn(shape))


def filled(cache: Cache, lengths: list[int], prompts: Turn, layer: Layer) -> Tensor:
    """What prompts say as they come into the slots."""
    slot = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    return Prefill(Packed(lengths), cache, slot=slot, position=position).attend_by_token(*prompts, layer)


def on_cpu(cache: Cache, places: Tensor) -> Decode:
    return Decode(cache, places, shortest=int(places.min()), longest=int(places.max()))


def stepped(heads: int, group: int, window: int, *, on_gpu: bool) -> list[Tensor]:
    """Prompts of several lengths, a step of all rows, one row that moves, and a step of two."""
    torch.manual_seed(0)
    cache, step_of = Cache(4, CAPACITY), GPUDecode if on_gpu else on_cpu
    layer, lengths = Layer(0, 0.3, window), [3, 7, 1]
    found = [filled(cache, lengths, turn(sum(lengths), heads, group), layer)]
    found.append(step_of(cache, torch.tensor(lengths)).attend_by_token(*turn(3, heads, group), layer))
    cache.move(torch.tensor([1]), torch.tensor([0]), 8)
    found.append(step_of(cache, torch.tensor([8, 2])).attend_by_token(*turn(2, heads, group), layer))
    return found


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize(("heads", "group"), GROUPS)
def test_a_step_is_that_of_a_cpu(heads: int, group: int, window: int) -> None:
    expected = stepped(heads, group, window, on_gpu=False)
    found = stepped(heads, group, window, on_gpu=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("flashing")
@pytest.mark.parametrize("window", [0, WINDOW, CAPACITY, CAPACITY + 1])
@pytest.mark.parametrize(("heads", "group"), GROUPS)
def test_flash_attention_sees_what_a_mask_shows(
    heads: int, group: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stepped(heads, group, window, on_gpu=True)
    for module in (attention, kv_gpu):
        monkeypatch.setattr(module, "has_flash_attention", lambda *_: False)
    expected = stepped(heads, group, window, on_gpu=False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


KINDS = [((2, 2), 0), ((1, 4), 0), ((2, 2), WINDOW), ((2, 2), 2), ((4, 2), 2), ((2, 4), 0)]
"""Heads with a key, queries of each, and the window of some layers of one model."""


@pytest.mark.parametrize("lengths", [[3, 7, 1], [6, 6, 6]])
@pytest.mark.parametrize("kind", ["cpu", "gpu", "flash"])
def test_layers_of_one_step_may_differ(lengths: list[int], kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "flash":
        request.getfixturevalue("flashing")
    torch.manual_seed(0)
    shared, places = Cache(3, CAPACITY), torch.tensor(lengths)
    step_of = on_cpu if kind == "cpu" else GPUDecode
    layers = [Layer(number, 0.3, window) for number, (_, window) in enumerate(KINDS)]
    prompts = [turn(sum(lengths), *heads) for heads, _ in KINDS]
    for layer, prompt in zip(layers, prompts, strict=True):
        filled(shared, lengths, prompt, layer)
    step = step_of(shared, places)
    for layer, prompt, (heads, _) in zip(layers, prompts, KINDS, strict=True):
        alone, tokens = Cache(3, CAPACITY), turn(3, *heads)
        filled(alone, lengths, prompt, layer)
        expected = on_cpu(alone, places).attend_by_token(*tokens, layer)
        torch.testing.assert_close(step.attend_by_token(*tokens, layer), expected)


@pytest.mark.usefixtures("flashing")
def test_a_window_is_where_the_keys_of_a_step_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[tuple[int, int]] = []

    def noted(query: Tensor, *_: object, window_size: tuple[int, int], **__: object) -> Tensor:
        windows.append(window_size)
        return query

    monkeypatch.setattr(flash, "varlen_attn", noted)
    step = GPUDecode(Cache(2, CAPACITY), torch.tensor([3, 7]))
    step.attend_by_token(*turn(2, 2, 2), Layer(0, 0.3, WINDOW))
    assert windows == [(-1, -1)]


def test_one_query_a_row_without_a_window_leaves_its_heads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven times as fast on an H100: kernels take the queries of a group for a sequence only then."""
    windows: list[object] = []

    def noted(query: Tensor, *_: object, window_size: tuple[int, int], **__: object) -> Tensor:
        windows.append(window_size)
        return query

    monkeypatch.setattr(flash, "varlen_attn", noted)
    starts, tokens = torch.arange(3, dtype=torch.int32), torch.zeros(2, 1, SIZE)
    for queries, window in ((1, 0), (1, 9), (1, 5), (2, 0), (2, 5)):
        spans = Spans(queries=starts, keys=starts, most_queries=queries, most_keys=9)
        spans.attend(tokens, tokens, tokens, Layer(0, 1.0, window))
    assert windows == [(-1, -1), (-1, -1), (4, 0), (-1, 0), (4, 0)]


@pytest.mark.parametrize(
    ("query", "value", "dtype", "capability", "expected"),
    [
        (16, 16, torch.bfloat16, (8, 0), True),
        (16, 16, torch.float16, (9, 0), True),
        (256, 256, torch.bfloat16, (8, 0), True),
        (264, 264, torch.bfloat16, (8, 0), False),
        (12, 12, torch.bfloat16, (8, 0), False),
        (16, 16, torch.float32, (8, 0), False),
        (16, 16, torch.bfloat16, (7, 5), False),
        (24, 16, torch.bfloat16, (8, 0), False),  # DeepSeek-V3's values are shorter than its queries
    ],
)
def test_flash_attention_is_for_some_heads_types_and_gpus(  # noqa: PLR0917
    query: int, value: int, dtype: torch.dtype, capability: tuple[int, int], expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with pretended():
        q, v = (torch.zeros(1, 1, size, dtype=dtype, device=GPU) for size in (query, value))
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
        assert flash.has_flash_attention(q, v) == expected
    assert not flash.has_flash_attention(
        torch.zeros(1, 1, query, dtype=dtype), torch.zeros(1, 1, value, dtype=dtype)
    )


def test_keys_are_stored_in_the_type_that_was_asked_for() -> None:
    cache, layer = Cache(2, CAPACITY, dtype=torch.bfloat16), Layer(0, 0.3, 0)
    tokens = turn(2, 2, 2)
    output = GPUDecode(cache, torch.tensor([0, 0])).attend_by_token(*tokens, layer)
    assert (output.dtype, cache.layers[0][0].dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(output, tokens.value.repeat_interleave(2, 1).flatten(1), atol=0.02, rtol=0)


def test_a_slot_that_nobody_has_may_stand_behind_its_end() -> None:
    cache, layer = Cache(3, CAPACITY), Layer(0, 0.3, 0)
    GPUDecode(cache, torch.tensor([0, CAPACITY + 3])).attend_by_token(*turn(2, 2, 2), layer)
    keys, _ = cache.layers[0]
    assert keys[2].count_nonzero() == keys[0, :, 1:].count_nonzero() == 0
    assert keys[1, :, -1].count_nonzero() > 0


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_kernel_that_returns_its_heads_apart(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of GPUs do: [n, K, G, D] whose memory is [n, G, K, D]; here without numbers."""

    def apart(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float) -> Tensor:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).expand(*query.shape[:3], key.shape[2])
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        found: Tensor = kernel(query, key, value, bias, False, scale=scale)[0]
        return found

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    monkeypatch.setattr(kv_gpu, "scaled_dot_product_attention", apart)
    step = GPUDecode(Cache(3, 32), torch.zeros(3, dtype=torch.int64, device="meta"))
    key, value = empty(3, heads, 16), empty(3, heads, 16)
    found = step.attend_by_token(empty(3, heads, 4 // heads, 16), key, value, Layer(0, 0.25, 0))
    assert found.shape == (3, 64)


class Counting:
    """A decoder whose logits are what it was fed, and which notes how many rows it computed."""

    capturable = True

    def __init__(self, kind: str = "counting") -> None:
        self.sizes: list[int] = []
        self._config: PreTrainedConfig = type("Named", (PreTrainedConfig,), {"model_type": kind})()

    def __call__(
        self, *, input_ids: Tensor, position_ids: Tensor, sequences: Cached, keep: Tensor | None
    ) -> Output:
        assert isinstance(sequences, GPUDecode)
        assert keep is None
        self.sizes.append(input_ids.shape[1])
        return Output(torch.stack([input_ids, position_ids], -1).float())

    @property
    def config(self) -> PreTrainedConfig:
        return self._config


SLOTS = 100


def steps(decoder: Counting) -> tuple[Callable[[int], Tensor | None], Tensor, Tensor]:
    places, tokens, cache = torch.arange(SLOTS), torch.arange(SLOTS) + 1000, Cache(SLOTS, 4)

    def compute(size: int) -> Tensor | None:
        place = places[:size]
        return logits_of(decoder, tokens[:size], place, GPUDecode(cache, place))  # type: ignore[arg-type]

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


def test_steps_that_cannot_be_recorded_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Counting("unrecordable")

    def refuse(_: GraphCapture, __: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(GraphCapture, "capture", refuse)
    monkeypatch.setattr(cuda_graphs, "_not_capturable", set())
    step, _, _ = steps(decoder)
    step(5)
    with pytest.warns(UserWarning, match="steps of unrecordable cannot be captured.*not permitted"):
        step(5)
    step(5)
    assert decoder.sizes == [32, 32, 5]
    later, _, _ = steps(decoder)
    for _ in range(3):
        later(5)
    assert decoder.sizes[3:] == [5, 5, 5]
    another, _, _ = steps(Counting("other"))
    another(5)
    with pytest.warns(UserWarning, match="steps of other"):
        another(5)


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
    step, _, _ = steps(decoder)
    step(5)
    with pytest.warns(UserWarning, match="no memory was left to capture decoding steps of counting"):
        step(5)
    step(5)
    assert decoder.sizes == [32, 32, 5]
    monkeypatch.setattr(GraphCapture, "capture", lambda _, compute: compute)
    later, _, _ = steps(decoder)
    for _ in range(3):
        later(5)
    assert decoder.sizes[3:] == [32, 32, 32]


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
