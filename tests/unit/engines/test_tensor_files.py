"""Who may read what is written: the umask says it of tensors, too, which safetensors writes privately."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rlhf_lightning.checkpoint import write_state
from rlhf_lightning.engines import FSDPEngine, save_file
from rlhf_lightning.engines.checkpoint import save_gathered
from rlhf_lightning.spec import LoRA, ModelSpec
from tests.unit.engines import tiny


@pytest.fixture(params=[0o22, 0o77], ids=oct)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a new file."""
    before = os.umask(request.param)
    yield oct(0o666 & ~request.param)
    os.umask(before)


def modes(directory: Path) -> set[str]:
    """Of its files, some of which hold tensors."""
    files = [file for file in directory.rglob("*") if file.is_file()]
    assert any(file.suffix == ".safetensors" for file in files)
    return {oct(file.stat().st_mode & 0o777) for file in files}


def test_files_of_a_checkpoint_are_as_the_umask_says(tmp_path: Path, mode: str) -> None:
    weights = {"model.x": torch.ones(3)}
    save_gathered(tmp_path, [weights], {}, shapes={"model.x": [3]}, rank=0, wait=lambda: None)
    write_state(tmp_path, {"buffer": torch.ones(2)})
    assert modes(tmp_path) == {mode}


def test_files_of_an_export_are_as_the_umask_says(tmp_path: Path, mode: str) -> None:
    spec = ModelSpec(path=str(tiny.write_causal(tmp_path / "model")), dtype="float32", lora=LoRA(rank=2))
    engine = FSDPEngine(spec)
    engine.export(tmp_path / "whole")
    (tmp_path / "adapters").mkdir()
    engine.export_adapters(tmp_path / "adapters")
    with safe_open(tmp_path / "adapters" / "adapter_model.safetensors", "pt") as adapters:
        assert adapters.metadata() == {"format": "pt"}
    assert modes(tmp_path / "whole") == modes(tmp_path / "adapters") == {mode}


def test_who_may_read_a_file_stays_as_it_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(1)}, file)
    file.chmod(0o640)
    save_file({"x": torch.ones(2)}, file)
    assert modes(tmp_path) == {"0o640"}
