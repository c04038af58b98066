"""What an engine on DeepSpeed keeps on the host, does without, and leaves behind."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines.choice import train_engine
from rlhf_lightning.engines.deepspeed.engine import ZeROEngine
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.workers import Reference
from tests.extras import zero
from tests.unit import spmd
from tests.unit.engines import tiny


def with_parameters_away(group: dist.ProcessGroup, spec: ModelSpec) -> tuple[Tensor, bool]:
    """What a model says whose parameters are on the host between layers; whether its masters are there."""
    config = zero.settings(3, offload_parameters=True)
    engine = train_engine(spec, head="lm", seat=zero.seat(group), config=config)
    assert isinstance(engine, ZeROEngine)
    said = engine.infer(zero.own(group), temperature=0.7)["log_probs"]
    return said, engine._module.optimizer.offload_optimizer


def test_masters_of_a_model_that_nothing_trains_go_to_the_host_with_it(paths: dict[str, Path]) -> None:
    spec = Reference(path=str(paths["tied"]))
    whole = zero.fsdp(spec).infer(tiny.rows(), temperature=0.7)["log_probs"]
    for rank, (said, away) in enumerate(spmd.run(2, with_parameters_away, spec)):
        assert away
        torch.testing.assert_close(said, whole[rank::2], rtol=0, atol=1e-5)
