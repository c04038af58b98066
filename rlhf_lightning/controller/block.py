"""The wire format of a column's shard: one NumPy buffer, which the object store maps without a copy.

NumPy knows no bfloat16, so a block carries the torch dtype beside a view that NumPy can hold. Columns of
Python objects (the raw data rows) travel as lists.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from numbers import Number

import numpy as np
import numpy.typing as npt
import torch

Rows = slice | npt.NDArray[np.int64]
"""Which rows of a block: a contiguous slice where possible, row numbers otherwise."""


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of one column.

    Example: `encode(torch.zeros(4, 8))` is `Block(array of shape [4, 8], "float32")`.
    """

    values: npt.NDArray[np.generic] | list[object]
    """[n, ...] numbers, or n Python objects."""
    dtype: str
    """Name of the torch dtype, or `object`."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def size_bytes(self) -> int:
        """Bytes of the numbers; 0 for Python objects."""
        return 0 if isinstance(self.values, list) else self.values.nbytes

    def take(self, rows: Rows) -> Block:
        """The given rows; a view where they are contiguous."""
        if not isinstance(self.values, list):
            return Block(self.values[rows], self.dtype)
        picked = self.values[rows] if isinstance(rows, slice) else [self.values[i] for i in rows]
        return Block(picked, self.dtype)

    def copied(self) -> Block:
        """The same rows in memory, and in objects, of their own."""
        return Block(deepcopy(self.values), self.dtype)


Shard = Mapping[str, Block]
"""What one object of Ray's store holds: blocks of the same rows, by column."""
Values = torch.Tensor | np.ndarray | Sequence[object]
"""Values of a column: numbers [n, ...], in an array or in a tensor on any device; or n Python objects."""


def is_number(value: object) -> bool:
    """Whether it is one number, and not one for each row."""
    return isinstance(value, Number) or (isinstance(value, torch.Tensor | np.ndarray) and not value.ndim)


def encode(value: Values) -> Block:
    """Turn the values of a column into a block."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        own = value.dtype.newbyteorder("=")
        value = torch.from_numpy(np.require(value, own, ["C", "W"]))  # a copy only where torch needs one
    if not isinstance(value, torch.Tensor):
        return Block([_held(item) if isinstance(item, torch.Tensor) else item for item in value], "object")
    host = _held(value).contiguous()
    name = str(host.dtype).removeprefix("torch.")
    if host.dtype == torch.bfloat16:
        host = host.view(torch.int16)
    return Block(host.numpy(), name)


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host, which any process can read, without the graph of its gradient."""
    return tensor.detach().to("cpu")


def decode(
    blocks: Sequence[Block], *, by: Sequence[Block] = (), name: str = ""
) -> torch.Tensor | list[object]:
    """Join blocks of one column into a tensor [n, ...] on the host, or a list if one has Python objects.

    One whole block is not copied: the tensor lies in the object store, where other processes read the same
    memory, and must not be written to.

    Args:
        blocks: at least one.
        by: int64 blocks that, joined, say which of the joined rows to take, in which order; none: all rows.
        name: of the column, for an error; empty where nobody knows it.

    Raises:
        ValueError: the blocks differ in width or type.
    """
    rows = np.concatenate([np.asarray(block.values, dtype=np.int64) for block in by]) if by else None
    if any(block.dtype == "object" for block in blocks):
        items = [item for block in blocks for item in _items(block)]
        return items if rows is None else [items[row] for row in rows]
    arrays = [np.asarray(block.values) for block in blocks]
    kinds = {(block.dtype, array.shape[1:]) for block, array in zip(blocks, arrays, strict=True)}
    if len(kinds) > 1:
        raise ValueError(
            f"blocks of {f'column {name!r}' if name else 'one column'} differ in dtype and width: "
            f"{sorted(map(str, kinds))}. Rows of several widths are joined by `joined` of "
            "rlhf_lightning.workers; a column that devices have made, pad to one width yourself, or return "
            "it as Python objects: NonTensorStack(*items)."
        )
    array = np.ascontiguousarray(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)
    array = array if rows is None else array[rows]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if blocks[0].dtype == "bfloat16" else tensor


def _items(block: Block) -> list[object]:
    """Rows as objects: those of a rank whose lists happen to be equally long are tensors, as of any other."""
    if isinstance(block.values, list):
        return block.values
    tensor = decode([block])
    assert isinstance(tensor, torch.Tensor)
    return tensor.tolist() if tensor.dim() == 1 else [*tensor]
