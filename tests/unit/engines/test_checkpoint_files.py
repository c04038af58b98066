"""Which files of an engine's checkpoint are opened, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import torch

from rlhf_lightning.engines import checkpoint


def test_headers_are_read_once_for_any_number_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that read a parameter at a time would else open every file for each."""
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 1)
    stored = {f"model.{name}": torch.randn(3) for name in "abc"}
    checkpoint.save_checkpoint(tmp_path, stored, {}, group=None)
    opened: list[str] = []

    def counted(filename: str, framework: str) -> object:
        opened.append(Path(filename).name)
        return safe_open(filename, framework)

    safe_open = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", counted)
    reader = checkpoint.CheckpointReader(tmp_path)
    for name, expected in stored.items():
        read = torch.empty(3)
        reader.fill({name: read})
        assert torch.equal(read, expected)
    assert len(set(opened)) == 3
    assert len(opened) == 3 + 3  # each header, then the file of each tensor
