"""BROADCAST over a model in stages: the last one, which alone knows what the model says, gives the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.controller import BROADCAST, Batch, Worker, register
from rlhf_lightning.controller.block import encode
from rlhf_lightning.controller.device import Device
from rlhf_lightning.controller.in_process import InProcessTransport, Made
from rlhf_lightning.controller.register import methods_of
from rlhf_lightning.controller.transfer import Output
from rlhf_lightning.controller.transport import Submitted
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.workers import Actor, Settings
from tests.unit import spmd
from tests.unit.engines import three_d, tiny

METHODS = ("give_weights", "read_all")


@dataclass(frozen=True, kw_only=True)
class Reading(Actor):
    """An actor with a method of a user."""

    @register(transfer=BROADCAST, reads=(), returns=("log_probs",))
    def read_all(self, rows: TensorDict) -> TensorDict:
        """What the model says of the rows."""
        return self.engine.infer(rows, temperature=1.0)


Columns = Mapping[str, Tensor]


def returned(group: dist.ProcessGroup, spec: ModelSpec, layout: ParallelLayout) -> dict[str, Columns]:
    """What this rank returns, by method."""
    seat, role = three_d.seat(group, layout), Reading(path=spec.path)
    role.binding.worker = Worker(**vars(seat), settings=Settings(engine="megatron"))
    role.binding.engine = three_d.megatron(seat, spec, "lm")
    rows, methods = tiny.rows(), methods_of(Reading)
    found = {name: cast(TensorDict, methods[name].function(role, rows)) for name in METHODS}
    return {
        name: {str(key): cast(Tensor, column) for key, column in table.items()}
        for name, table in found.items()
    }


def collected(layout: ParallelLayout, shares: Sequence[Columns]) -> Batch:
    """What the controller makes of it."""
    transport = InProcessTransport(Device(0))
    outputs: dict[int, Output] = {}
    for rank, columns in enumerate(shares):
        made = {name: Made(encode(column), transport) for name, column in columns.items()}
        num_rows = len(next(iter(columns.values())))
        outputs[rank] = Output(Submitted(Made(None, transport), made), num_rows)
    return BROADCAST.collect(layout, outputs)


@pytest.mark.parametrize(
    "layout", [ParallelLayout(p=2), ParallelLayout(p=2, d=2, order="tdp")], ids=["stages", "replicas"]
)
def test_a_model_in_stages_is_read_by_all_ranks_and_gives_its_weights(
    layout: ParallelLayout, tmp_path: Path
) -> None:
    spec = tiny.spec(three_d.write(tmp_path, "qwen"))
    shares = spmd.run(layout.num_ranks, returned, spec, layout)
    weights, said = (collected(layout, [share[name] for share in shares]) for name in METHODS)
    alone = three_d.fsdp(spec, "lm")
    assert torch.equal(weights["weights"][0], alone.give_weights())
    expected = alone.infer(tiny.rows(), temperature=1.0)["log_probs"]
    torch.testing.assert_close(said["log_probs"], expected, atol=1e-5, rtol=0)  # float32, in another order
    assert float(expected.abs().max()) > 0.1
