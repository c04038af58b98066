"""Where the models stand, and in which portions they compute, does not change what they learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_lightning.algos import PPO
from rlhf_lightning.engines import FSDP
from rlhf_lightning.engines.huggingface.models import load_causal_lm
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.strategies import Colocated, Split, Standalone
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Settings
from tests.ray.model import STEPS, Parameters, fit, furthest, ppo

SMALL = Settings(train=FSDP(max_tokens_per_micro_batch=40))
OTHERS: dict[str, Callable[[], Strategy]] = {
    "split-2": lambda: Split(devices=2),
    "standalone-3": lambda: Standalone(devices=3),
    "advantages-on-workers": lambda: Colocated(devices=2, settings=Settings(advantages="workers")),
    "micro-batches-2": lambda: Colocated(devices=2, settings=SMALL, offload=True),
}
"""Beside two devices in default portions (test_resume.py) and two tensor ranks (test_tensor_parallel.py)."""


def test_it_learned_from_scores_of_answers_of_many_lengths(alone: tuple[PPO, Parameters], tiny: Path) -> None:
    algorithm, learned = alone
    last = {name: float(value) for name, value in algorithm.trainer.callback_metrics.items()}
    assert 0 < last["reward/min"] < last["reward/mean"]
    assert last["response/length_mean"] < last["response/length_max"]
    fresh: dict[str, torch.Tensor] = load_causal_lm(ModelSpec(path=str(tiny))).state_dict()
    assert furthest(learned, {name: fresh[name] for name in learned}) > 1e-4


@pytest.mark.parametrize("name", OTHERS)
def test_the_parameters_are_the_same(
    alone: tuple[PPO, Parameters], name: str, tiny: Path, tmp_path: Path
) -> None:
    assert furthest(alone[1], fit(ppo(tiny), OTHERS[name](), tmp_path, steps=STEPS)) < 1e-5
