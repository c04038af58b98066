"""Turns of an environment with vLLM as the generator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from rlhf_lightning.engines.vllm.engine import VLLMEngine
from rlhf_lightning.functional import turn_ids
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Settings
from tests.extras.generating import SMALL
from tests.extras.test_vllm_fit import write_model
from tests.ray.talking import STEPS, gaps, learn
from tests.unit.algos import small


class Watch(Callback):
    """Notes whether vLLM computed in the actor's memory."""

    def __init__(self) -> None:
        self.borrowed: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        actor = small.built(pl_module)["actor"]
        assert isinstance(actor, Actor)
        assert isinstance(actor.generator, VLLMEngine)
        self.borrowed.append(actor.generator._zero_copy is not None)


@pytest.mark.parametrize(("engine", "borrows"), [("fsdp", False), ("megatron", True)])
def test_log_probs_are_of_the_tokens_in_their_place(
    engine: Literal["fsdp", "megatron"], borrows: bool, tmp_path: Path
) -> None:
    settings = Settings(engine=engine, generator="vllm", vllm=replace(SMALL, zero_copy=True))
    model, watch = Path(write_model(tmp_path / "model")), Watch()
    batches, _ = learn(
        Local(settings=settings), model, tmp_path / "run", recompute_log_probs=True, callbacks=[watch]
    )
    assert watch.borrowed == [borrows] * STEPS
    assert {gap for batch in batches for gap in gaps(batch)} == {0, 1, 2}
    for batch in batches:
        mask, drawn = batch["response_mask"], batch["rollout_log_probs"]
        assert torch.equal(turn_ids(mask).amax(1) + 1, batch["row_turns"])
        assert (drawn[mask] < 0).all()
        assert not drawn[~mask].any()
        assert torch.allclose(drawn[mask], batch["log_probs"][mask], atol=1e-4)
