"""Turns of an environment are the same wherever the actor generates, and it is asked once for each copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_lightning.controller import Batch
from rlhf_lightning.functional import turn_ids
from rlhf_lightning.parallel import Generation
from rlhf_lightning.strategies import Colocated, HybridEngine3D, Local, OneStepOff, OpenRLHF
from rlhf_lightning.strategies.hybrid3d import Parallel3D
from rlhf_lightning.strategy import Strategy
from tests.ray.talking import STEPS, gaps, learn


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Batch], list[str]]:
    """In this process."""
    batches, asked = learn(Local(), tiny, tmp_path_factory.mktemp("alone"))
    assert {gap for batch in batches for gap in gaps(batch)} == {0, 1, 2}
    return batches, asked


def tensor() -> HybridEngine3D:
    return HybridEngine3D(parallel=Parallel3D(t=2, generate=Generation(1, 2)), devices=2)


@pytest.mark.parametrize(
    "strategy", [Colocated(devices=2), tensor(), OpenRLHF(devices=3)], ids=["data", "tensor", "apart"]
)
def test_turns_are_those_of_one_process(
    alone: tuple[list[Batch], list[str]], strategy: Strategy, tiny: Path, tmp_path: Path, cluster: str
) -> None:
    batches, asked = learn(strategy, tiny, tmp_path)
    assert asked == alone[1]
    for found, wanted in zip(batches, alone[0], strict=True):
        for name in ("row_ids", "response_ids", "response_mask", "row_truncated"):
            assert torch.equal(found[name], wanted[name]), name
        assert torch.allclose(found["log_probs"], wanted["log_probs"], atol=1e-4)


def test_one_step_off(alone: tuple[list[Batch], list[str]], tiny: Path, tmp_path: Path, cluster: str) -> None:
    batches, _ = learn(OneStepOff(devices=3), tiny, tmp_path)
    assert torch.equal(batches[0]["response_ids"], alone[0][0]["response_ids"])
    assert [len(batch) for batch in batches] == [8] * STEPS
    for batch in batches:
        assert torch.equal(turn_ids(batch["response_mask"]).amax(1) + 1, batch["row_turns"])
