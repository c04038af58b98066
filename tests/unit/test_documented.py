"""What documents say of defaults is so."""

from __future__ import annotations

from rlhf_lightning.algos import GRPO, SFT
from rlhf_lightning.engines import ZeRO
from tests.conftest import ROOT


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def test_learning_rates() -> None:
    assert (GRPO().actor.optimizer.lr, SFT().actor.optimizer.lr) == (1e-6, 1e-5)
    assert "`actor/lr` (1e-6 by default, with SFT 1e-5;" in page("running.md")


def test_only_a_stage_that_is_not_the_default_gathers_to_generate() -> None:
    assert ZeRO().stage == 2
    assert "| on every rank; with `--strategy.settings.zero.stage 3` gathered" in page("patterns.md")
