"""Models that are awkward to divide, and a few steps of training that all engines and layouts agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from rlhf_lightning.engines import FSDP, FSDPEngine, Head, Megatron, TrainEngine
from rlhf_lightning.engines.head import Asked
from rlhf_lightning.engines.megatron.engine import MegatronEngine
from rlhf_lightning.engines.megatron.optimizer import FrozenParameters
from rlhf_lightning.parallel import ModelGroups, ParallelLayout, Seat
from rlhf_lightning.spec import ModelSpec
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Fit

STEPS, BUDGET = 3, 20
_SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "pad_token_id": 65,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
MODELS: dict[str, PreTrainedConfig] = {
    "tied": LlamaConfig(
        **_SIZES,
        num_key_value_heads=1,
        num_hidden_layers=5,
        tie_word_embeddings=True,
        rope_parameters=_ROPE,
        rms_norm_eps=1e-2,
    ),
    "qwen": Qwen2Config(
        **_SIZES,
        num_key_value_heads=2,
        num_hidden_layers=3,
        tie_word_embeddings=False,
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=1,
    ),
    "biased": LlamaConfig(
        **_SIZES,
        num_key_value_heads=2,
        num_hidden_layers=2,
        tie_word_embeddings=False,
        attention_bias=True,
        head_dim=8,
    ),
}
"""One key-value head, scaled angles and an uneven number of layers; windows and biases; more biases."""


def write(directory: Path, name: str) -> Path:
    """Save one of the models with random weights, norms and biases too."""
    return tiny.write_noisy(directory, MODELS[name])


def seat(group: dist.ProcessGroup, layout: ParallelLayout) -> Seat:
    """Of this rank, with groups made for it."""
    return Seat(group.rank(), layout, torch.device("cpu"), None, ModelGroups.create_all(layout))


def megatron(seat: Seat, spec: ModelSpec, head: Head, config: Megatron | None = None) -> MegatronEngine:
    """An engine with small micro-batches."""
    settings = config or Megatron(max_tokens_per_micro_batch=BUDGET)
    return MegatronEngine(spec, head=head, seat=seat, config=settings)


def fsdp(spec: ModelSpec, head: Head) -> FSDPEngine:
    """The engine to equal, on one device."""
    return FSDPEngine(spec, head=head, config=FSDP(max_tokens_per_micro_batch=BUDGET))


@dataclass
class Trained:
    """What an engine said and became."""

    outputs: dict[str, Tensor]
    """Before the first step."""
    metrics: dict[str, float]
    """Of the last step."""
    norms: list[float]
    weights: Tensor
    gradients: Mapping[str, Tensor]
    """Of the first step, by Hugging Face name; empty where they are not whole on any rank."""


def step(engine: TrainEngine, rows: TensorDict) -> tuple[dict[str, Tensor], float]:
    """One step; its metrics and the norm."""
    loss = Fit(needs_entropy=engine._head == "lm")  # type: ignore[attr-defined]
    metrics = engine.accumulate(rows, loss, tiny.counts(), temperature=1.0)
    return metrics, engine.optimizer_step()["grad_norm"]


def train(engine: FSDPEngine | MegatronEngine, rows: TensorDict) -> Trained:
    """Evaluate, then step."""
    outputs = engine.infer(rows, temperature=0.7, asked=Asked(entropy=True, likeliest=3))
    gradients: dict[str, Tensor] = {}
    assert not isinstance(engine._optimizer, FrozenParameters)
    own = engine._optimizer.step

    def watched() -> dict[str, float]:
        gradients.update(_gradients(engine) if not gradients else {})
        return own()

    engine._optimizer.step = watched  # type: ignore[method-assign]
    steps = [step(engine, rows) for _ in range(STEPS)]
    metrics = {name: float(metric) for name, metric in steps[-1][0].items()}
    return Trained(
        {str(name): outputs[str(name)] for name in outputs.keys()},  # noqa: SIM118 - it iterates over rows
        metrics,
        [norm for _, norm in steps],
        engine.give_weights(),
        gradients,
    )


def _gradients(engine: FSDPEngine | MegatronEngine) -> dict[str, Tensor]:
    if isinstance(engine, FSDPEngine):
        masters = engine._weights.masters.items()
        return {name: master.grad.clone() for name, master in masters if master.grad is not None}
    if engine._config.distributed_optimizer:
        return {}
    found = engine._weights.gathered(lambda name: engine.shards[name].main_grad)  # type: ignore[attr-defined]
    return {name: value.clone() for name, value in found}
