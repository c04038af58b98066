"""Checkpoints of training engines: written by any number of ranks, read by any other number and any engine.

    engine.json                      counters, and the names and shapes of all tensors; written last
    shard-0000i-model-*.safetensors  the tensors or shards that rank i wrote, about half a gigabyte a file
Nothing is pickled, so loading a stranger's checkpoint runs none of their code.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlhf_lightning.engines.dtensor import local
from rlhf_lightning.engines.tensor_files import read_header, save_file

_FILE = "engine.json"
_SHAPES = "shapes"
_SHARDS = "shard-*.safetensors"
_FILE_BYTES = 1 << 29


def require_shared(directory: Path) -> None:
    """Refuse a directory of the controller's that this node does not see."""
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is a directory of the controller's, and not there on this node. Checkpoints need a "
            "disk that all nodes share, and so do exports: try --trainer.default_root_dir, or their "
            "directory, on one."
        )


def save_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, object],
    *,
    group: dist.ProcessGroup | None,
) -> None:
    """Write tensors, whole or sharded, and a JSON state; replaces a checkpoint in the directory."""
    first = group is None or dist.get_rank(group) == 0
    if first:
        _begin(directory)  # before the others write: torch plans what they do on this rank
    writer = HuggingFaceStorageWriter(
        str(directory), fqn_to_index_mapping=_files(tensors), save_distributed=True
    )
    with _named_failures():
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    if first:
        _end(directory, state, {name: tensor.shape for name, tensor in tensors.items()})
    _wait(group)


def save_gathered(
    directory: Path,
    parts: Iterable[Mapping[str, Tensor]],
    state: Mapping[str, object],
    *,
    shapes: Mapping[str, Sequence[int]],
    rank: int,
    wait: Callable[[], None],
) -> None:
    """Write the same files from whole tensors that are gathered one after the other; all ranks call it.

    Args:
        directory: where to write; a checkpoint there is replaced.
        parts: the tensors that this rank writes, on the host; iterating may be collective.
        state: plain numbers.
        shapes: of all tensors of all ranks.
        rank: this rank's number among those that write.
        wait: a barrier of all of them.
    """
    if rank == 0:
        _begin(directory)
    wait()
    tensors: dict[str, Tensor] = {}
    files = 0
    for part in parts:
        tensors |= part
        if sum(tensor.nbytes for tensor in tensors.values()) >= _FILE_BYTES:
            files += 1
            save_file(tensors, directory / _file_name(rank, files))
            tensors = {}
    if tensors:
        save_file(tensors, directory / _file_name(rank, files + 1))
    wait()
    if rank == 0:
        _end(directory, state, shapes)
    wait()


def read_state(directory: Path, expected: Mapping[str, Sequence[int]]) -> dict[str, object]:
    """Read the JSON state of a checkpoint, and check that it holds tensors of these names and shapes.

    Raises:
        ValueError: there is no complete checkpoint, or it is of another model, with other tensors or shapes.
    """
    file = directory / _FILE
    if not file.exists():
        raise ValueError(f"{directory}: holds no checkpoint, {_FILE} is missing. Type another directory.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as err:
        raise ValueError(f"{file}: is damaged ({err}). Copy it again, or type another checkpoint.") from err
    shapes = content.get(_SHAPES) if isinstance(content, dict) else None
    if not isinstance(shapes, dict):
        raise ValueError(f"{file}: does not describe a checkpoint. Type another directory.")
    for name, shape in expected.items():
        if shapes.get(name) != list(shape):
            raise ValueError(
                f"{directory}: is of another model: {name} has shape {list(shape)} here and "
                f"{shapes.get(name, 'is absent')} there. Type a checkpoint of this model."
            )
    return cast(dict[str, object], content)


def check_files(directory: Path) -> None:
    """Refuse a checkpoint of which files are truncated or missing; reads only their headers."""
    shapes = cast(dict[str, list[int]], read_state(directory, {})[_SHAPES])
    found: Counter[str] = Counter()
    for file in sorted(directory.glob(_SHARDS)):
        found.update({name: prod(shape) for name, shape in read_header(file).items()})
    lacking = [name for name, shape in shapes.items() if found[name] < prod(shape)]
    if lacking:
        raise ValueError(
            f"{directory}: lacks {lacking[0]}, or a part of it, and so for {len(lacking)} of {len(shapes)} "
            f"tensors: files are missing. Copy them again ({_SHARDS}), or type another checkpoint."
        )


class CheckpointReader(HuggingFaceStorageReader):
    """Fills tensors from a checkpoint; the headers of its files are read once, for however many calls."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))

    def fill(self, tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
        """Fill tensors, whole or sharded, in place; all ranks of a group call it."""
        with _named_failures():
            load(dict(tensors), storage_reader=self, process_group=group, no_dist=group is None)

    @cached_property
    def _metadata(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self) -> Metadata:
        """What the headers of all files say; torch asks at each load."""
        return self._metadata


def _begin(directory: Path) -> None:
    """Remove a checkpoint from the directory, its engine.json first: from then on it counts as none."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _FILE).unlink(missing_ok=True)
    for stale in directory.glob(_SHARDS):
        stale.unlink()


def _end(directory: Path, state: Mapping[str, object], shapes: Mapping[str, Sequence[int]]) -> None:
    """Write engine.json, which makes the directory a checkpoint."""
    text = json.dumps({**state, _SHAPES: {name: list(shape) for name, shape in shapes.items()}}, indent=1)
    (directory / _FILE).write_text(text, encoding="utf-8")


def _file_name(rank: int, number: int) -> str:
    return f"shard-{rank + 1:05d}-model-{number:05d}.safetensors"


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of each tensor's file; files are small since the writer assembles each in memory.

    Each rank has a file of its own of each number, so shards are counted, not the tensors that they are of.
    """
    files, size = {}, 0
    for name, tensor in tensors.items():
        files[name] = 1 + size // _FILE_BYTES
        size += local(tensor).nbytes
    return files


@contextmanager
def _named_failures() -> Iterator[None]:
    """Raise the first rank's own exception instead of CheckpointException, which is no `Exception`.

    Torch does not warn of a single process.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as err:
        cause, _ = next(iter(err.failures.values()))
        raise cause from None


def _wait(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group)
