"""Blocks: every type of column comes back as it went, and one block is read where it lies."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from rlhf_lightning.controller.block import decode, encode

TYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3), (0, 3)])
def test_numbers_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape) * 4 - 1).to(dtype)
    back = decode([encode(value)])
    assert isinstance(back, torch.Tensor)
    assert back.dtype == dtype
    assert torch.equal(back, value)


def test_strided_and_differentiable_columns_come_back() -> None:
    value = torch.arange(6.0, requires_grad=True).view(2, 3).T
    back = decode([encode(value)])
    assert isinstance(back, torch.Tensor)
    assert back.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not back.requires_grad
    ragged = encode([value, value[0]]).copied().values
    assert [str(item) for item in ragged] == [str(item.detach()) for item in (value, value[0])]


def test_one_block_is_not_copied_and_read_only_memory_gives_no_warning() -> None:
    block = encode(torch.arange(12).view(4, 3))
    assert not isinstance(block.values, list)
    block.values.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = decode([block.take(slice(1, 3))])
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert rows.data_ptr() == block.values.ctypes.data + 3 * 8


def test_blocks_are_joined_in_order() -> None:
    value = torch.randn(6, 2).to(torch.bfloat16)
    back = decode([encode(value[4:]), encode(value[:4])])
    assert isinstance(back, torch.Tensor)
    assert torch.equal(back, torch.cat([value[4:], value[:4]]))


@pytest.mark.parametrize("other", [torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64)])
def test_blocks_that_do_not_fit_are_refused(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="differ in dtype and width"):
        decode([encode(torch.zeros(2, 3)), encode(other)])


def test_python_objects_come_back() -> None:
    block = encode([{"a": 1}, None, "text"])
    assert decode([block.take(slice(1, 3)), block]) == [None, "text", {"a": 1}, None, "text"]
    assert block.size_bytes == 0


@pytest.mark.parametrize("kind", ["reversed", "read-only", "big-endian"])
def test_an_array_may_lie_in_memory_as_it_likes(kind: str) -> None:
    array = np.arange(3, dtype=">f4" if kind == "big-endian" else "f4")
    array.flags.writeable = kind != "read-only"
    array = array[::-1] if kind == "reversed" else array
    with warnings.catch_warnings(action="error"):
        found = decode([encode(array)])
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == array.tolist()
    assert found.dtype == torch.float32
