"""The three folders at the top are imported under one name only, and the links that make it so are whole."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ROOT

FOLDERS = ("algos", "strategies", "configs")


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_is_relative(folder: str) -> None:
    link = ROOT / "rlhf_lightning" / folder
    if not link.is_symlink():
        pytest.skip("a distribution holds folders in place of the links")
    assert str(link.readlink()) == f"../{folder}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_import_under_the_other_name_is_refused(folder: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert f"This folder is imported as 'rlhf_lightning.{folder}', not as '{folder}'." in run.stderr


def test_type_checkers_read_the_installed_package() -> None:
    """Without this file mypy takes everything in it for Any, or refuses the import."""
    assert (ROOT / "rlhf_lightning" / "py.typed").read_text() == ""
    assert "Typing :: Typed" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]


def test_no_extra_pins_a_library_of_others() -> None:
    """Hydra, and so verl, needs an antlr of 4.9."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"data", "tasks", "lora"} <= set(extras)
    assert not [each for extra in extras.values() for each in extra if "antlr" in each]


def test_imports_as_subpackage() -> None:
    assert importlib.import_module("rlhf_lightning.configs").__doc__


@pytest.mark.parametrize("name", ["rlhf_lightning", "rlhf_lightning.data"])
def test_names_that_are_imported_late_are_completed(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) <= set(dir(module))
