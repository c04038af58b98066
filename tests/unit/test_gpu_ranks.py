"""Ranks of the tests on GPUs: each sees its own before anything starts CUDA, which then looks no more."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import pytest
import torch

from tests.gpu import ranks

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
    def here(rank: Callable[[int], None], *, nprocs: int) -> None:
        assert nprocs == 1
        pickle.loads(pickle.dumps(rank))(0)  # noqa: S301 - its own

    monkeypatch.setattr(ranks, "start_processes", here)
    monkeypatch.setenv(SEEN, "5,6")
    (found,) = ranks.run(1, Importing())  # type: ignore[arg-type]
    assert found == {"imported": torch.tensor(5), "own": torch.tensor(5)}
