"""What docs/own_algorithm.md has in Python: a method that runs on the devices, and a loss with its test."""

from __future__ import annotations

import re
from typing import cast

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from rlhf_lightning.controller import Batch, Metrics, Worker
from rlhf_lightning.controller.register import methods_of
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.workers import Actor, Settings
from tests.conftest import ROOT
from tests.unit import spmd


def run_documented(*parts: str, document: str = "own_algorithm.md") -> dict[str, object]:
    """What the blocks with these lines make, as a reader would copy them."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    for part in parts:
        (code,) = (block for block in blocks if part in block)
        exec(code, names)  # noqa: S102 - the package's own document
    return names


def documented() -> type[Actor]:
    """The role."""
    return cast(type[Actor], run_documented("Watched(Actor)")["Watched"])


def measured(group: dist.ProcessGroup, kind: type[Actor], rows: Batch) -> dict[str, float]:
    """What a rank returns of its share."""
    rank, layout = group.rank(), ParallelLayout(d=group.size())
    role = kind(path="embedded")
    role.binding.worker = Worker(
        rank=rank, layout=layout, device=torch.device("cpu"), dp_group=group, groups=None, settings=Settings()
    )
    mine = rows.split(group.size())[rank]
    share = TensorDict({"response_mask": mine["response_mask"]}, batch_size=len(mine))
    return cast(dict[str, float], methods_of(kind)["length"].function(role, share))


@pytest.mark.parametrize("lengths", [[1, 2, 6, 3], [1, 2, 6], [5]], ids=["even", "uneven", "a rank has none"])
def test_a_mean_over_all_rows(lengths: list[int]) -> None:
    rows = Batch.of({"response_mask": torch.arange(8) < torch.tensor(lengths)[:, None]})
    found = Metrics([spmd.run(2, measured, documented(), rows)]).fetch()
    assert found == {"mine/length": sum(lengths) / len(lengths)}


def test_a_loss_is_called_alone() -> None:
    value = run_documented("class Weighted(Loss)", "loss = Weighted()")["value"]
    assert isinstance(value, torch.Tensor)
    assert float(value.detach()) == 0.5
