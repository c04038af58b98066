"""What tests on GPUs rely on, where there are none: ranks, a warning that must not come, few packages."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch

from rlhf_lightning.engines.native import cuda_graphs
from rlhf_lightning.engines.native.cuda_graphs import GraphCapture
from tests.gpu import ranks, test_repeated
from tests.unit.engines import tiny
from tests.unit.pretended import GPU, pretended

SEEN = "CUDA_VISIBLE_DEVICES"


def seen(device: torch.device) -> dict[str, torch.Tensor]:
    """What is visible as a rank begins."""
    del device
    return {"own": torch.tensor(int(os.environ[SEEN]))}


class Importing:
    """A body whose module asks for GPUs as it is imported, like DeepSpeed's."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return imported, ("",)


def imported(_: str) -> Callable[[torch.device], dict[str, torch.Tensor]]:
    """What a rank gets where a body was sent to it."""
    before = torch.tensor(int(os.environ[SEEN]))
    return lambda device: {"imported": before, **seen(device)}


def test_a_rank_sees_its_own_gpu_before_its_body_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(rank: Callable[[int, ranks.Job], None], *, args: tuple[ranks.Job], nprocs: int) -> None:
        assert nprocs == 1
        rank(0, *pickle.loads(pickle.dumps(args)))  # noqa: S301 - its own

    monkeypatch.setattr(ranks, "start_processes", here)
    monkeypatch.setenv(SEEN, "5,6")
    (found,) = ranks.run(1, Importing())  # type: ignore[arg-type]
    assert found == {"imported": torch.tensor(5), "own": torch.tensor(5)}


@pytest.mark.parametrize(
    ("gpus", "version", "joins"), [(4, 22809, True), (1, 23007, True), (1, 22809, False), (0, 23007, False)]
)
def test_nccl_joins_ranks_that_share_a_gpu_from_2_30_on(
    gpus: int, version: int, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "num_gpus", lambda: gpus)
    monkeypatch.setattr(ranks, "nccl_version", lambda: version)
    assert ranks.by_nccl(4) == joins
    if not joins:
        with pytest.raises(pytest.skip.Exception, match=r"needs 4 GPUs, or NCCL 2\.30: here are"):
            ranks.need(4)


def test_what_cannot_be_captured_fails_the_test_of_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object, compute: object) -> None:
        raise RuntimeError("not permitted")

    monkeypatch.setattr(test_repeated, "be_deterministic", lambda *_, **__: None)
    monkeypatch.setattr(cuda_graphs, "_not_capturable", set())
    path = tiny.write_causal(tmp_path)
    refused = mock.patch.object(GraphCapture, "capture", refuse)
    with pretended(), refused, pytest.raises(UserWarning, match="cannot be captured"):
        test_repeated.twice(GPU, path=path, dtype="float32")


def test_those_of_vllm_need_no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "tests.extras.generating", raising=False)
    assert import_module("tests.extras.generating").SMALL
