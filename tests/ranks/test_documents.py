"""Every `rlhf` command of README.md and docs/ is one that the parser accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import yaml  # type: ignore[import-untyped]

from tests.conftest import ROOT
from tests.documents import commands
from tests.ranks.test_own_methods import run_documented
from tests.unit.rlhf import Rlhf

MISSING = "my_package"
"""A reader's own."""
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
TYPED = sorted({line for file in PAGES for line in commands(file) if line.startswith("rlhf ")})


def test_there_are_commands() -> None:
    assert len(TYPED) > 50


@pytest.mark.parametrize("command", TYPED)
def test_a_command_is_accepted(
    command: str, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind, *words = shlex.split(command)[1:]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    if kind in ("fit", "validate", "predict"):
        code, out, err = rlhf.run(kind, *words, "--print_config")
        says = "usage: rlhf" if "--help" in words else "class_path: "
        assert (code == 0 and says in out) or f"No module named {MISSING!r}" in err, err
    elif kind == "export":
        assert f"checkpoint {words[0]!r} is not there" in rlhf.refused(kind, *words)
    elif kind == "calibrate":  # it would measure, or read a run
        (tmp_path / words[0]).mkdir()
        assert f"{words[0]}: is a directory" in rlhf.refused(kind, *words)
    else:
        rlhf.succeeds(kind, *words)


def test_the_first_run_is_configured_as_its_file_says(
    rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "first_run.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(written)
    out = rlhf.succeeds("fit", "-c", "run.yaml", "--print_config")
    actor = yaml.safe_load(out)["algo"]["init_args"]["actor"]["init_args"]
    assert (actor["dtype"], actor["optimizer"]["warmup_steps"]) == ("bfloat16", 10)


def test_the_reward_of_the_first_run() -> None:
    boxed = cast(Callable[..., list[float]], run_documented("def boxed(")["boxed"])
    said = [r"\boxed{4} or \boxed{5}", r"\boxed{4}", "5"]
    assert boxed([""] * 3, said, [{"answer": "5"}] * 3) == [1.0, 0.0, 0.0]
