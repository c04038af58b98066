"""What documents say of defaults is so."""

from __future__ import annotations

import re
import tomllib

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


def test_an_algorithm_is_as_short_as_the_readme_says() -> None:
    (most,) = re.findall(r"one file of (\d+) lines at most", (ROOT / "README.md").read_text(encoding="utf-8"))
    lines = [len(file.read_text(encoding="utf-8").splitlines()) for file in ROOT.glob("algos/*.py")]
    assert max(lines) <= int(most)


def test_the_drawing_of_imports_is_the_contract() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = text.partition("\n```\n__main__\n")[2].partition("```")[0].splitlines()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    assert [re.findall(r"\w+", line) for line in ["__main__", *drawn]] == [
        re.findall(r"\w+", layer) for layer in layers
    ]
