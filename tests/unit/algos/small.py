"""Short runs in this process, on the embedded model cut to two layers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.spec import EMBEDDED_DIRECTORY
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Role

Numbers = dict[str, float]
Weights = dict[str, Mapping[str, torch.Tensor]]
"""By role, and by name in the model."""


def write_model(directory: Path) -> str:
    """A directory with the configuration of a model of two small layers, and the embedded tokenizer."""
    config = AutoConfig.from_pretrained(EMBEDDED_DIRECTORY)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 2, 32, 48
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 2, 16
    config.layer_types = None
    config.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_DIRECTORY / name, directory / name)
    return str(directory)


def write_judge(directory: Path) -> str:
    """Such a directory with the weights of a reward model, which has learned nothing."""
    return judging(write_model(directory))


def judging(path: str) -> str:
    """The directory, after the weights of a reward model were written into it."""
    config = AutoConfig.from_pretrained(path, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return path


def write_other(directory: Path, words: int) -> str:
    """A model whose tokenizer numbers the bytes otherwise, but for some of the first."""
    write_model(directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    moved = tokens[:words] + tokens[: words - 1 : -1]
    tokenizer["model"]["vocab"] = {token: number for number, token in enumerate(moved)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(directory)


def write_rows(file: Path, rows: list[dict[str, object]]) -> str:
    """A JSON Lines file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


class Keep(Callback):
    """Metrics of iterations, devices, weights of trained models: fresh, after the first, at the end."""

    def __init__(self) -> None:
        self.numbers: list[Numbers] = []
        self.fresh: Weights = {}
        self.first: Weights = {}
        self.weights: Weights = {}
        self.devices: set[torch.device] = set()
        self.reference = torch.empty(0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the weights as they begin."""
        self.fresh = trained(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        self.numbers.append({name: float(value) for name, value in trainer.logged_metrics.items()})
        self.first = self.first or trained(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = trained(pl_module)
        engines = [role.engine for role in built(pl_module).values() if role.path]
        self.devices = {engine._device for engine in engines if isinstance(engine, FSDPEngine)}
        if "reference" in (roles := built(pl_module)):
            self.reference = roles["reference"].engine.give_weights()


def built(module: pl.LightningModule) -> dict[str, Role]:
    """The roles of a run."""
    assert isinstance(module, RLHFAlgorithm)
    roles = module.strategy.transport.device.roles  # type: ignore[union-attr]
    return {name: role for name, role in roles.items() if isinstance(role, Role)}


def trained(module: pl.LightningModule) -> Weights:
    """Copies of the weights of the models that train."""
    weights: Weights = {}
    for name, role in built(module).items():
        if role.trains:
            with cast(FSDPEngine, role.engine).gathered() as model:
                weights[name] = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return weights


def run(algorithm: RLHFAlgorithm, data: pl.LightningDataModule, *, steps: int = 2, **options: object) -> Keep:
    """Fit for some iterations; what came out."""
    kept = Keep()
    trainer = pl.Trainer(
        strategy=Local(**options),  # type: ignore[arg-type]
        accelerator="cpu",
        max_steps=steps,
        callbacks=[kept],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(algorithm, datamodule=data)
    return kept
