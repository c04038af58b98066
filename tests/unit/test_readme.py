"""What the documents say is there: `make` targets, pages, headings, the step of PPO."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

from rlhf_lightning.algos import PPO
from tests.conftest import ROOT
from tests.documents import commands

DOCUMENTS = ("README.md", "CONTRIBUTING.md")
PAGES = [*DOCUMENTS, *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md")))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


MAKE = sorted({line for name in DOCUMENTS for line in commands(name) if line.startswith("make")})


@pytest.mark.parametrize("command", MAKE)
def test_make_target_exists(command: str) -> None:
    assert set(shlex.split(command)[1:]) <= make_targets()


def test_the_test_command_of_the_readme_is_the_one_of_the_pipeline() -> None:
    assert "make test" in commands("README.md")
    assert re.search(
        r"^part test make test\b", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE
    )


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    links = LINK.findall((ROOT / name).read_text(encoding="utf-8"))
    missing = [link for link in links if not ((ROOT / name).parent / link).exists()]
    assert not missing


def test_every_picture_stands_on_a_page() -> None:
    """Or a row of a table leads to it."""
    files = [ROOT / name for name in PAGES]
    links = {(file, link) for file in files for link in LINK.findall(file.read_text(encoding="utf-8"))}
    shown = {(file.parent / link).resolve() for file, link in links}
    pictures = [path for path in ROOT.glob("docs/images/**/*.*") if path.is_file()]
    assert len(pictures) > 40
    assert not set(pictures) - shown


def anchors(text: str) -> set[str]:
    """Of the headings of a document, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_anchors_are_headings(name: str) -> None:
    """A link into a page, `data.md#rows` or `#rows`, names one of its headings."""
    here = ROOT / name
    found = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", here.read_text(encoding="utf-8"))
    pages = {page: (here.parent / page if page else here).read_text(encoding="utf-8") for page, _ in found}
    assert not [f"{page}#{anchor}" for page, anchor in found if anchor not in anchors(pages[page])]


def test_the_step_of_ppo_is_the_one_of_the_readme() -> None:
    source = inspect.getsource(PPO.step).replace('        """One iteration."""\n', "")
    assert f"class PPO(RLHFAlgorithm):\n{source}```" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "examples/ppo.py"])
def test_the_first_python_runs_on_whatever_devices_there_are(name: str) -> None:
    """A number of them is refused on a machine with fewer GPUs."""
    given = re.findall(r"strategy=(\w+\(.*?\))", (ROOT / name).read_text(encoding="utf-8"))
    assert given == ["Colocated()"]


def test_an_unknown_target_and_flag_would_be_seen(tmp_path: Path) -> None:
    assert "dmeo" not in make_targets()
    document = tmp_path / "README.md"
    document.write_text("```bash\nmake dmeo  # x\nrlhf fit \\\n  --algo ppo\n```\n```python\nmake no\n```\n")
    assert commands(str(document)) == ["make dmeo", "rlhf fit --algo ppo"]
