"""What surrounds an optimizer step on a worker."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tensordict import TensorDict

from rlhf_lightning.engines import TrainEngine, host_memory
from rlhf_lightning.functional import SFTLoss
from rlhf_lightning.workers import Actor


@pytest.mark.parametrize(("learned", "times"), [(True, 2), (False, 0)])
def test_freed_memory_is_given_back_after_fifty_steps_that_were_made(
    monkeypatch: pytest.MonkeyPatch, learned: bool, times: int
) -> None:
    actor, given_back = Actor(), mock.Mock()
    engine = actor.binding.engine = mock.create_autospec(TrainEngine, instance=True)
    engine.optimizer_step.side_effect = lambda: {"lr": float(given_back.call_count)}
    monkeypatch.setattr(host_memory, "give_back_freed_memory", given_back)
    monkeypatch.setattr(Actor, "accumulate", lambda *_, **__: {})
    rows = TensorDict({"x": torch.zeros(1)}, batch_size=[1])
    rates = []
    for _ in range(100):
        actor.binding.accumulated = learned
        metrics = actor.update(rows, loss=SFTLoss(), temperature=1.0, name="actor")
        rates.append(metrics.get("actor/lr"))
    assert given_back.call_count == times
    assert rates == (50 * [0.0] + 50 * [1.0] if learned else 100 * [None]), "after the step, not before it"
