"""What users of Lightning write by habit: it works, or they are told what to write here."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from rlhf_lightning.algos import GRPO
from rlhf_lightning.strategies import Local
from tests.unit.algos.short import grpo, refusal, trainer


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


def test_batches_of_a_plain_loader_are_no_columns(tmp_path: Path) -> None:
    texts: DataLoader[str] = DataLoader(["Sort 21: ", "Sort 43: "], batch_size=2)  # type: ignore[arg-type]
    for held_out in (None, texts):
        run = trainer(Local(), tmp_path, limit_val_batches=1)
        with pytest.raises(TypeError, match=r"^a list is no batch: .* datamodule=PromptData\(path="):
            run.fit(grpo(), texts, held_out)


def test_a_checkpoint_is_loaded_by_a_run(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"^GRPO\.load_from_checkpoint: .* trainer\.fit\(GRPO\(\.\.\.\), ckpt_path="
    ):
        GRPO.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")


class Warming(GRPO):
    """Raises the learning rate as Lightning's documentation does."""

    def optimizer_step(self, *_: object, **__: object) -> None:
        """Nothing that anybody would see."""


def test_methods_that_nobody_would_call(tmp_path: Path) -> None:
    told = refusal(grpo(Warming), tmp_path)
    assert told.startswith("Warming.optimizer_step is never called: each model is updated on its devices, ")
