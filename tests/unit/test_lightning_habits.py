"""What users of Lightning write by habit: it works, or they are told what to write here."""

from __future__ import annotations

from pathlib import Path

from rlhf_lightning.algos import GRPO
from tests.unit.algos.short import grpo, refusal


class Recorded(GRPO):
    """Saves its options by itself, which `setup` does anyway."""

    budget: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.save_hyperparameters()


def test_an_algorithm_may_save_its_hyperparameters(tmp_path: Path) -> None:
    algorithm = grpo(Recorded)
    assert algorithm.hparams["budget"] == 2.0
    assert refusal(algorithm, tmp_path) == "started"
    assert algorithm.hparams["actor"]["sampling"]["max_new_tokens"] == 2
