"""Frozen descriptions that cross processes: which model, how it is optimised, how it samples.

They hold plain values only, so that they pickle, print and compare, and they import nothing heavy: the
command line can refuse bad input before any process starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from rlhf_lightning.field_types import check_types

Dtype = Literal["float32", "bfloat16"]
EMBEDDED = "embedded"
"""The path that stands for the small model shipped in the package."""
EMBEDDED_DIRECTORY = Path(__file__).parent / "embedded"
"""Where that model is."""
CHECKPOINT = "trainer.json"
"""The file by which a checkpoint is recognised."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a config.json that mark a mixture of experts, where they are not 0."""
_CONVERTED = ("llama", "qwen2")
"""Values of `model_type` that the Megatron engine has."""
_ROPES = ("default", "linear", "llama3")
"""Kinds of rotary embeddings that the Megatron engine has."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """AdamW with a learning-rate schedule and gradient clipping."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay, per unit of learning rate, of all weights, norms and biases too."""
    grad_clip: float = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up; the first one has lr / (warmup_steps + 1)."""
    warmup_ratio: float = 0.0
    """Share of `total_steps` that warms up, rounded to whole steps, in place of `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    total_steps: int = 0
    """Optimizer steps after which `linear` and `cosine` reach their end."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of `linear` and `cosine`, as a share of `lr`."""

    def __post_init__(self) -> None:
        check_types(self)
        _require(self.lr >= 0, f"optimizer.lr={self.lr}: a learning rate is not negative. Try 1e-6.")
        _require(
            all(0 <= beta < 1 for beta in self.betas),
            f"optimizer.betas={self.betas}: each lies in [0, 1). Try 0.9 and 0.999.",
        )
        _require(self.eps > 0, f"optimizer.eps={self.eps}: must be above 0. Try 1e-8.")
        _require(self.weight_decay >= 0, f"optimizer.weight_decay={self.weight_decay}: use 0 for no decay.")
        _require(self.grad_clip >= 0, f"optimizer.grad_clip={self.grad_clip}: use 0 for no clipping.")
        _require(self.warmup_steps >= 0, f"optimizer.warmup_steps={self.warmup_steps}: use 0 for no warm-up.")
        _require(
            0 <= self.warmup_ratio < 1 and not (self.warmup_ratio and self.warmup_steps),
            f"optimizer.warmup_ratio={self.warmup_ratio} with warmup_steps={self.warmup_steps}: a share of "
            "total_steps, in [0, 1), in place of warmup_steps. Try 0.1, and leave warmup_steps out.",
        )
        decays = self.schedule != "constant"
        _require(
            self.total_steps > self.warmup or not (decays or self.warmup_ratio),
            f"optimizer.schedule={self.schedule} with total_steps={self.total_steps}, warmup_steps="
            f"{self.warmup_steps} and warmup_ratio={self.warmup_ratio}: nothing is left after the warm-up. "
            "Set total_steps higher: to the optimizer steps of the run, iterations x epochs x (answers, or "
            "pairs, of an iteration / mini_batch_size).",
        )
        for name in ("total_steps", "min_lr_ratio"):
            value = getattr(self, name)
            is_read = decays or (name == "total_steps" and self.warmup_ratio > 0)
            _require(
                is_read or not value,
                f"optimizer.{name}={value} with schedule=constant: a constant rate has no end. "
                f"Take schedule linear or cosine, or leave {name} out.",
            )
        _require(
            0 <= self.min_lr_ratio <= 1,
            f"optimizer.min_lr_ratio={self.min_lr_ratio}: a part of lr, so it lies in [0, 1]. Try 0.1.",
        )

    @property
    def warmup(self) -> int:
        """Optimizer steps of warm-up."""
        return self.warmup_steps or round(self.warmup_ratio * self.total_steps)


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters, W + alpha / rank B A, of which A and B learn (Hu 2021, section 4.1).

    There is no dropout: a policy ratio compares two passes over the same tokens.
    """

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float = 32.0
    """B A is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Last parts of names of linear layers, such as q_proj; empty: all linear layers but the output layer."""
    path: str = field(default="", compare=False)
    """Directory of adapters to begin with, as peft writes it; empty: fresh ones."""

    def __post_init__(self) -> None:
        check_types(self)
        # A sorted tuple, so that they can be compared with those of a checkpoint.
        object.__setattr__(self, "target_modules", tuple(sorted(self.target_modules)))
        _require(self.rank >= 1, f"lora.rank={self.rank}: an adapter has a rank of at least 1. Try 16.")
        _require(self.alpha > 0, f"lora.alpha={self.alpha}: must be above 0. Try twice the rank.")

    @property
    def scale(self) -> float:
        """The factor of B A, alpha / rank."""
        return self.alpha / self.rank


def export_first(path: str) -> str:
    """What to type where a directory is a checkpoint or a part of one, and has to be a model; else empty."""
    given = Path(path).expanduser()
    if (given / CHECKPOINT).is_file():
        return f"It is a checkpoint: type OUT after `rlhf export {path} OUT`."
    if given.is_dir() and (given.parent / CHECKPOINT).is_file():
        role = given.name
        return f"It lies in a checkpoint: type OUT after `rlhf export {Path(path).parent} OUT {role}`."
    return ""


def why_not_megatron(family: str, *, mlp_bias: bool = False, rope: str = "default") -> str:
    """Why the Megatron engine does not take a model, however it is divided; empty where it does.

    Args:
        family: `model_type` of its config.json.
        mlp_bias: whether its feed-forward layers have biases.
        rope: kind of its rotary embedding.
    """
    if family not in _CONVERTED:
        return f"model_type={family!r}: Megatron takes {' and '.join(_CONVERTED)} only"
    if mlp_bias:
        return "mlp_bias=true: the Megatron engine takes no biases in MLPs"
    if rope not in _ROPES:
        return f"rope_type={rope!r}: the Megatron engine has the rotary embeddings {', '.join(_ROPES)} only"
    return ""


def run_seed() -> int:
    """The seed of the run: what `--seed_everything` (lightning.seed_everything) was given, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model of the dataflow: where its weights come from, and how they are trained."""

    trains: ClassVar[bool] = True
    """Whether it learns: engines have no memory for the gradients of a model that does not."""

    path: str = EMBEDDED
    """A Hugging Face directory (with weights, or with a config.json alone), a hub name with safetensors, or
    `embedded`."""
    dtype: Dtype | None = None
    """Type of the computation; master weights, gradients and optimizer state stay float32. None: the actor's
    type if the role has the actor's path, else float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    init_seed: int | None = None
    """Seed of weights that the directory does not hold (a fresh value head, a config without weights); None:
    the seed of the run."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """Used where the model is trained."""
    lora: LoRA | None = None
    """Train adapters only, on the FSDP engine; a scalar model, such as a critic, trains its head too."""

    @property
    def computes_in(self) -> Dtype:
        """The type of the computation; float32 where `dtype` is None."""
        return self.dtype or "float32"

    @property
    def weights_change(self) -> bool:
        """Whether its weights change during a run: if so it has float32 masters, and checkpoints hold it."""
        return True


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int = 128
    """Most tokens in a response (R); a response that reaches it without a stop token is truncated."""
    temperature: float = 1.0
    """Divides the logits; log-probabilities everywhere are those of the divided logits. 0 means greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Before top_k and top_p, keep the tokens at least this many times as likely as the likeliest."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response beside the tokenizer's end token and those of generation_config.json; the
    stop token belongs to the response."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response too, such as </answer>; the token that completes one belongs to the response.
    They are searched in the text of all tokens, special ones included: `user` is found in <user>."""

    def __post_init__(self) -> None:
        check_types(self)
        _require(
            self.max_new_tokens >= 1, f"sampling.max_new_tokens={self.max_new_tokens}: must be at least 1."
        )
        _require(self.temperature >= 0, f"sampling.temperature={self.temperature}: use 0 for greedy.")
        _require(self.top_k >= 0, f"sampling.top_k={self.top_k}: use 0 to keep all tokens.")
        _require(0 < self.top_p <= 1, f"sampling.top_p={self.top_p}: must lie in (0, 1].")
        _require(0 <= self.min_p <= 1, f"sampling.min_p={self.min_p}: must lie in [0, 1].")
        _require(
            min(self.stop_token_ids, default=0) >= 0,
            f"sampling.stop_token_ids={list(self.stop_token_ids)}: a token's number is not negative.",
        )
        _require(
            all(self.stop_strings),
            f"sampling.stop_strings={self.stop_strings!r}: give a list of texts, none of them empty, such "
            'as ["</answer>"].',
        )
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))  # those of YAML are lists
