"""What a GPU computes a step with, here on a CPU: flash attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlhf_lightning.engines.native import kv_gpu
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.engines.native.kv import Decode, Prefill
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


@pytest.mark.usefixtures("flashing")
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("most", [1, 4, 5])
def test_rows_may_have_more_heads_than_one_call_of_flash_attention_takes(
    most: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stepped(2, 2, window, on_gpu=True)
    monkeypatch.setattr(kv_gpu, "_MOST_SEQUENCES", most)
    found = stepped(2, 2, window, on_gpu=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("flashing")
def test_no_call_of_flash_attention_has_more_sequences_than_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences: list[int] = []

    def noted(query: Tensor, _: Tensor, __: Tensor, starts: Tensor, *___: object, **____: object) -> Tensor:
        sequences.append(len(starts) - 1)
        return query

    monkeypatch.setattr(flash, "varlen_attn", noted)
    rows = 32_768
    step = GPUDecode(Cache(rows, 1), torch.zeros(rows, dtype=torch.int64))
    tokens = turn(rows, 2, 1)
    torch.testing.assert_close(step.attend_by_token(*tokens, Layer(0, 0.3, 0)), tokens.query.flatten(1))
    assert sequences == [65_535, 1]


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


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Those that the kernel is called with."""
    found: list[tuple[int, int]] = []

    def noted(query: Tensor, *_: object, window_size: tuple[int, int], **__: object) -> Tensor:
        found.append(window_size)
        return query

    monkeypatch.setattr(flash, "varlen_attn", noted)
    return found


@pytest.mark.usefixtures("flashing")
def test_a_window_is_where_the_keys_of_a_step_begin(windows: list[tuple[int, int]]) -> None:
    step = GPUDecode(Cache(2, CAPACITY), torch.tensor([3, 7]))
    step.attend_by_token(*turn(2, 2, 2), Layer(0, 0.3, WINDOW))
    assert windows == [(-1, -1)]


def test_one_query_a_row_without_a_window_leaves_its_heads_together(windows: list[tuple[int, int]]) -> None:
    """Seven times as fast on an H100: kernels take the queries of a group for a sequence only then."""
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


@pytest.fixture
def with_cudnn() -> Iterator[None]:
    """CuDNN's attention as torch has it, whatever computed before."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("with_cudnn")
def test_cudnn_is_left_on_until_something_attends_on_a_gpu() -> None:
    """The process may be a user's, who has models of his own."""
    Packed([2, 3])
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with pretended():
        Packed([2, 3], device=GPU)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(True)
        GPUDecode(Cache(2, CAPACITY), torch.zeros(2, dtype=torch.int64, device=GPU))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


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
