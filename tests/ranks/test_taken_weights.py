"""An engine becomes another whose weights it is given, and says what gathering them took."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines import FSDPEngine, Transition
from rlhf_lightning.spec import ModelSpec
from tests.unit import spmd
from tests.unit.engines import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_causal(tmp_path_factory.mktemp("model"))


def learned(path: Path, dtype: tiny.Dtype = "float32") -> FSDPEngine:
    engine = FSDPEngine(tiny.spec(path, dtype=dtype))
    engine.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
    engine.optimizer_step()
    return engine


def through_one_tensor(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """As a link gives them: each only until the next."""
    room = torch.empty(0)
    for name, value in weights:
        room = room.to(value.dtype)
        room.resize_(value.shape).copy_(value)
        yield name, room


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_computes_what_the_giver_computes(path: Path, dtype: tiny.Dtype) -> None:
    giver, taker = learned(path, dtype), FSDPEngine(tiny.spec(path, dtype=dtype))
    before = taker.infer(tiny.rows(), temperature=1.0)["log_probs"]
    version = taker.version
    taker.take_weights(through_one_tensor(giver.weights()))
    assert taker.version != version
    found = taker.infer(tiny.rows(), temperature=1.0)["log_probs"]
    assert not torch.equal(found, before)
    assert torch.equal(found, giver.infer(tiny.rows(), temperature=1.0)["log_probs"])


def test_weights_of_another_model_are_refused(path: Path, tmp_path: Path) -> None:
    taker, other = (
        FSDPEngine(tiny.spec(path)),
        FSDPEngine(tiny.spec(tiny.write_causal(tmp_path, intermediate_size=64))),
    )
    shapes = "model.layers.0.mlp.gate_proj.weight (64, 64) and has (96, 64)"
    with pytest.raises(ValueError, match=re.escape(f"was given {shapes}. Giver and taker must")):
        taker.take_weights(other.weights())
    every = list(taker.weights())
    with pytest.raises(ValueError, match=re.escape(f"was given no {every[-1][0]}")):
        taker.take_weights(every[:-1])
    with pytest.raises(ValueError, match=re.escape("was given more (1,) and has no such parameter")):
        taker.take_weights([*every, ("more", torch.zeros(1))])


def gathered(group: dist.ProcessGroup, spec: ModelSpec) -> Transition:
    engine = FSDPEngine(spec, group=group)
    with engine.generating():
        pass
    with pytest.raises(NotImplementedError, match="only on one device"):
        engine.take_weights([])
    return engine.transition()


def test_gathering_is_counted(path: Path) -> None:
    spec = tiny.spec(path)
    alone = FSDPEngine(spec)
    whole = alone.give_weights().nbytes
    with alone.generating():
        pass
    found_alone = replace(alone.transition(), seconds=0.0)
    assert found_alone == Transition(training_bytes=whole, generation_bytes=whole)
    found = spmd.run(2, gathered, spec)
    assert sum(one.training_bytes for one in found) == whole
    assert [one.received_bytes + one.training_bytes for one in found] == [whole, whole]
    assert all(one.generation_bytes == whole and one.seconds > 0 for one in found)
