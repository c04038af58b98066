"""Whole runs whose updates take the products of the generation learn what those learn that compute anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_lightning.algos import GRPO, PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP
from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers import Actor, Settings
from tests.unit.algos import small
from tests.unit.engines.test_record import products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without it")


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_run_learns_the_same_with_fewer_products(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small.write_model(tmp_path)
    ends = []
    for kept in (0, 10_000):
        actor = Actor(path=model, sampling=Sampling(max_new_tokens=8, stop_token_ids=tuple(range(64))))
        algorithm = PPO(actor=actor) if kind == "ppo" else GRPO(actor=actor, group_size=2)
        data = TaskData(num_rows=16, num_val_rows=2, batch_size=8)
        with products(monkeypatch) as found:
            ends.append((small.run(algorithm, data, settings=Settings(train=FSDP(kept_tokens=kept))), found))
    (plain, whole), (keeping, fewer) = ends
    assert len(fewer) <= len(whole) - 2 * (2 * 7 + 1)  # two updates of the actor, two layers and the last
    for role, weights in plain.weights.items():
        for name, weight in weights.items():
            torch.testing.assert_close(keeping.weights[role][name], weight, rtol=0, atol=1e-5)
