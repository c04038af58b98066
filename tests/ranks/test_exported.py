"""A model is written whole by whichever rank of the world it stands on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_lightning.engines.huggingface.models import export_gathered, load_causal_lm
from rlhf_lightning.spec import ModelSpec
from tests.unit import spmd


def export(group: dist.ProcessGroup, model: str, to: Path) -> None:
    spec = ModelSpec(path=model)
    module = load_causal_lm(spec)
    own = next(pair for pair in [dist.new_group([rank]) for rank in range(2)] if dist.get_rank(pair) == 0)
    where = to / str(dist.get_rank())
    where.mkdir()
    export_gathered(where, module.state_dict().items(), like=module, spec=spec, group=own)


@pytest.mark.parametrize("rank", range(2))
def test_every_rank_can_write(paths: dict[str, Path], tmp_path: Path, rank: int) -> None:
    spmd.run(2, export, str(paths["lm"]), tmp_path)
    written = load_file(tmp_path / str(rank) / "model.safetensors")
    held = load_causal_lm(ModelSpec(path=str(paths["lm"]))).state_dict()
    assert written.keys() == held.keys()
    assert all(torch.equal(written[name], held[name]) for name in written)
    assert (tmp_path / str(rank) / "config.json").is_file()
