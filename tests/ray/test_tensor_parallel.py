"""PPO on another family of models learns the same where devices share every layer, and goes on elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from transformers import AutoConfig, Qwen2Config

from rlhf_lightning.algos import PPO
from rlhf_lightning.engines import FSDP, FSDPEngine
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.strategies import Colocated, Local
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Settings
from tests.ray.model import STEPS, fit, furthest, ppo, write_tiny


def divided(devices: int) -> Strategy:
    """Two tensor ranks, and what is left of the devices for rows; or one device."""
    return Local() if devices == 1 else Colocated(devices=devices, settings=Settings(train=FSDP(tensor=2)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a Qwen2, with biases and a tied output layer."""
    directory = tmp_path_factory.mktemp("qwen")
    write_tiny(directory)
    sizes = json.loads((directory / "config.json").read_text())
    for key in ("architectures", "model_type", "head_dim", "transformers_version"):
        sizes.pop(key)
    Qwen2Config(**sizes | {"tie_word_embeddings": True}).save_pretrained(directory)
    assert AutoConfig.from_pretrained(directory).model_type == "qwen2"
    return directory


class Weigh(Callback):
    """Notes the largest share of the actor's moments that one device of a run has."""

    def __init__(self, path: Path) -> None:
        self.whole = 8 * len(FSDPEngine(ModelSpec(path=str(path))).give_weights())
        self.shares: list[float] = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask."""
        assert isinstance(pl_module, PPO)
        ranks = pl_module.actor.memory().fetch()
        self.shares.append(max(parts["optimizer"] for parts in ranks) / self.whole)


@pytest.mark.parametrize(("first", "then"), [(4, 1), (1, 2)])
def test_a_run_goes_on_in_another_layout(
    first: int, then: int, cluster: str, qwen: Path, tmp_path: Path
) -> None:
    """All steps on one device; on the first ones; and from their first checkpoint on, on the other ones."""
    alone = fit(ppo(qwen), Local(), tmp_path / "alone", steps=STEPS)
    weigh = Weigh(qwen)
    saving = ModelCheckpoint(
        dirpath=tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )
    whole = fit(ppo(qwen), divided(first), tmp_path / "first", steps=STEPS, callbacks=[saving, weigh])
    checkpoint = str(tmp_path / "kept" / "step=1.ckpt")
    rest = fit(
        ppo(qwen), divided(then), tmp_path / "rest", steps=STEPS, callbacks=[weigh], ckpt_path=checkpoint
    )
    assert furthest(alone, whole) < 1e-5
    assert furthest(alone, rest) < 1e-5
    assert weigh.shares == pytest.approx([1 / first, 1 / then], rel=0.02)
