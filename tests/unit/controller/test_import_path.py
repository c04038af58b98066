"""In which order a device looks for modules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rlhf_lightning.controller.import_path import ImportPath

LIBRARY = os.path.dirname(os.__file__)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where some are, one of them the current one."""
    for name in ("script", "inserted", "appended", "here", "packages"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def names(path: ImportPath) -> list[list[str]]:
    return [[os.path.basename(place) for place in part] for part in (path.first, path.rest)]


def test_those_of_the_controller(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["inserted", "script", "gone"], ["packages", "appended"]
    first, rest = ([str(folders / name) for name in part] for part in own)
    monkeypatch.setattr(sys, "path", [*first, LIBRARY, *rest])
    library = os.path.basename(LIBRARY)
    assert names(ImportPath.of_controller()) == [
        ["inserted", "script"],
        [library, "packages", "appended", "here"],
    ]
    monkeypatch.setattr(sys, "path", ["", LIBRARY])
    assert names(ImportPath.of_controller()) == [["here"], [library, "here"]]


@pytest.mark.parametrize(
    ("before", "own_first", "after"),
    [
        ("here script node lib packages", False, "inserted script node lib packages appended here"),
        ("here script copy lib packages", True, "copy inserted script lib packages appended here"),
        ("here script lib others", False, "inserted script lib others packages appended here"),
        ("here script own-lib", False, "inserted script own-lib lib packages appended here"),
    ],
    ids=["a-node's-PYTHONPATH", "a-runtime-environment", "other-packages", "no-library"],
)
def test_those_of_a_device(before: str, own_first: bool, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has it look into the current folder and the script's first."""
    given = ImportPath(("inserted", "script"), (LIBRARY, "packages", "appended", "here"))
    monkeypatch.setattr(sys, "path", [LIBRARY if name == "lib" else name for name in before.split()])
    given.take(own_first=own_first)
    assert ["lib" if place == LIBRARY else place for place in sys.path] == after.split()
