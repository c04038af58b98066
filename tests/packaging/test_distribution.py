"""The distribution is whole: sdist -> wheel -> fresh environment, no extras -> every module imports."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

UV = Path(sys.executable).with_name("uv")
PACKAGE = "rlhf_lightning"
MAX_WEIGHTS_BYTES = 8_000_000

IMPORT_EVERY_MODULE = """
import importlib, pathlib, sys
import rlhf_lightning
root = pathlib.Path(rlhf_lightning.__file__).parent
assert root.is_relative_to(pathlib.Path(sys.prefix).resolve()), f"imported from {root}, not from {sys.prefix}"
names = sorted(".".join(path.relative_to(root.parent).with_suffix("").parts) for path in root.rglob("*.py"))
extras, light = [], {"__init__", "config"}
for name in names:
    try:
        importlib.import_module(name.removesuffix(".__init__"))
    except ModuleNotFoundError as err:
        package, _, module = name.rpartition(".")
        if package != f"rlhf_lightning.engines.{err.name}" or module in light:
            raise
        extras.append(err.name)
assert set(extras) <= {"vllm", "deepspeed"}, extras
sys.stdout.write(f"imported {len(names)} modules")
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def files_of_the_package() -> set[str]:
    """Files below rlhf_lightning/, those behind its links included."""
    folders = [PACKAGE, "algos", "strategies", "configs"]
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *folders).splitlines()
    real = [name for name in listed if not (ROOT / name).is_symlink() and (ROOT / name).is_file()]
    return {name if name.startswith(f"{PACKAGE}/") else f"{PACKAGE}/{name}" for name in real}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--quiet", "--python", sys.executable, "--out-dir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The `bin` of an environment that holds the wheel and the base dependencies, no extras."""
    home = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home)
    (wheel,) = built.glob("*.whl")
    constraints = ROOT / "constraints.txt"
    run(
        UV,
        "pip",
        "install",
        "--quiet",
        "--python",
        home / "bin" / "python",
        "--constraint",
        constraints,
        wheel,
    )
    yield home / "bin"
    run("rm", "-rf", home)


def test_sdist_holds_the_package_and_its_tests(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert files_of_the_package() <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"} <= names


def test_wheel_holds_every_file_of_the_package(built: Path) -> None:
    (archive,) = built.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        sizes = {entry.filename: entry.file_size for entry in wheel.infolist()}
    assert {name for name in sizes if name.startswith(f"{PACKAGE}/")} == files_of_the_package()
    assert sum(size for name, size in sizes.items() if name.endswith(".safetensors")) <= MAX_WEIGHTS_BYTES


@pytest.mark.timeout(900)
def test_every_module_imports_without_extras(environment: Path, tmp_path: Path) -> None:
    said = run(environment / "python", "-c", IMPORT_EVERY_MODULE, cwd=tmp_path)
    num_modules = sum(name.endswith(".py") for name in files_of_the_package())
    assert said.endswith(f"imported {num_modules} modules")


def test_command_line_is_installed(environment: Path, tmp_path: Path) -> None:
    said = run(environment / "rlhf", "fit", "--help", cwd=tmp_path)
    assert "--algo" in said
    assert "--strategy" in said
