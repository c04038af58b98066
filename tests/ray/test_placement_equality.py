"""Where the models stand, and in which portions they compute, does not change what they learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_lightning.engines import FSDP
from rlhf_lightning.engines.models import load_causal_lm
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.strategies import Colocated, Split, Standalone
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Settings
from tests.ray.model import Parameters, fit, furthest, ppo

STEPS = 3
OTHERS: dict[str, Callable[[], Strategy]] = {
    "colocated-2": lambda: Colocated(devices=2),
    "split-2": lambda: Split(devices=2),
    "standalone-4": lambda: Standalone(devices=4),
    "micro-batches": lambda: Colocated(
        devices=1, settings=Settings(train=FSDP(max_tokens_per_micro_batch=40)), offload=True
    ),
}


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory, module_leaves_nothing: None) -> Parameters:
    """All models on one device."""
    return fit(ppo(tiny), Colocated(devices=1), tmp_path_factory.mktemp("alone"), steps=STEPS)


def test_it_learned(alone: Parameters, tiny: Path) -> None:
    fresh: dict[str, torch.Tensor] = load_causal_lm(ModelSpec(path=str(tiny))).state_dict()
    assert furthest(alone, {name: fresh[name] for name in alone}) > 1e-4


@pytest.mark.parametrize("name", OTHERS)
def test_the_parameters_are_the_same(alone: Parameters, name: str, tiny: Path, tmp_path: Path) -> None:
    assert furthest(alone, fit(ppo(tiny), OTHERS[name](), tmp_path, steps=STEPS)) < 1e-5
