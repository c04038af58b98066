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
from tests.ray.model import STEPS, Parameters, fit, furthest, ppo, write_tiny


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
    """Notes the largest share of the actor's moments that one device has."""

    def __init__(self, path: Path) -> None:
        self.whole = 8 * len(FSDPEngine(ModelSpec(path=str(path))).give_weights())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        ranks = pl_module.actor.memory().fetch()
        self.share = max(parts["optimizer"] for parts in ranks) / self.whole


def learned(qwen: Path, devices: int, root: Path, *, first: Path | None = None) -> tuple[Parameters, float]:
    """All steps, or those after another run's first; and the largest share of the moments on a device."""
    weigh = Weigh(qwen)
    saving = ModelCheckpoint(dirpath=root / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    found = fit(
        ppo(qwen),
        divided(devices),
        root,
        steps=STEPS,
        callbacks=[saving, weigh],
        ckpt_path=str(first / "kept" / "step=1.ckpt") if first else None,
    )
    return found, weigh.share


def test_a_run_goes_on_in_another_layout(cluster: str, qwen: Path, tmp_path: Path) -> None:
    """From one device to two tensor ranks, and from two pairs of them to one device."""
    one, four = tmp_path / "one", tmp_path / "four"
    (alone, share), (whole, quarter) = learned(qwen, 1, one), learned(qwen, 4, four)
    split, half = learned(qwen, 2, tmp_path / "split", first=one)
    back, again = learned(qwen, 1, tmp_path / "back", first=four)
    assert max(furthest(alone, found) for found in (whole, split, back)) < 1e-5
    assert [share, quarter, half, again] == pytest.approx([1, 1 / 4, 1 / 2, 1], rel=0.02)
