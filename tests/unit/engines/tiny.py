"""A model of two layers, rows with all kinds of masks, and what plain transformers computes on them.

n rows, P prompt width, R response width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf_lightning.engines import FSDP, FSDPEngine
from rlhf_lightning.functional.aggregate import Counts, Loss
from rlhf_lightning.parallel import ParallelLayout, Seat
from rlhf_lightning.spec import ModelSpec, OptimizerSpec

Dtype = Literal["float32", "bfloat16"]

VOCABULARY = 89
PROMPT, RESPONSE = 5, 6
MASKS = ("110000", "111111", "000000", "101100", "100000", "001101")
"""One token to all of them, gaps, a gap in front, and a row with nothing."""
LONGEST = PROMPT + RESPONSE
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
"""Of a decoder of any family, with grouped heads."""
SEAT = Seat(0, ParallelLayout(), torch.device("cpu"), None, None)
"""Of a model on one device."""


def config(
    *, intermediate_size: int = 96, num_hidden_layers: int = 2, num_labels: int = 2, tie: bool = False
) -> LlamaConfig:
    """A tiny decoder with grouped heads."""
    settings = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
    )
    settings.num_labels = num_labels
    return settings


def make_groups(config: FSDP, layout: ParallelLayout) -> None:
    """Make the groups of a model on all ranks of the world, as a job does before it builds its engines."""
    for ranks in config.groups(layout, range(layout.num_ranks)):
        dist.new_group(list(ranks))


def write_causal(
    directory: Path, *, intermediate_size: int = 96, num_hidden_layers: int = 2, tie: bool = False
) -> Path:
    """Save a causal language model with random weights."""
    settings = config(intermediate_size=intermediate_size, num_hidden_layers=num_hidden_layers, tie=tie)
    return _write(directory, lambda: AutoModelForCausalLM.from_config(settings))


def write_models(directory: Path) -> dict[str, Path]:
    """One of each kind: a language model, with tied embeddings, with wider layers, and with a scalar head."""
    return {
        "lm": write_causal(directory / "causal"),
        "tied": write_causal(directory / "tied", tie=True),
        "wide": write_causal(directory / "wide", intermediate_size=128),
        "scalar": write_scalar(directory / "scalar"),
    }


def write_scalar(directory: Path) -> Path:
    """Save a sequence classifier with one label."""
    return _write(directory, lambda: AutoModelForSequenceClassification.from_config(config(num_labels=1)))


def write_in_types(directory: Path) -> list[Path]:
    """Save the same numbers in float32 and in bfloat16."""
    source = write_causal(directory / "source", tie=True)
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        model.to(getattr(torch, dtype)).save_pretrained(directory / dtype)
    return [directory / "float32", directory / "bfloat16"]


def write_noisy(
    directory: Path, config: PreTrainedConfig, *, weights: float = 0.1, others: float = 0.3
) -> Path:
    """Save a language model with random weights, norms and biases too, of these standard deviations."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=weights if parameter.dim() > 1 else others)
        model.save_pretrained(directory)
    return directory


def write_experts(directory: Path) -> Path:
    """Save a mixture of experts whose routers draw in training mode."""
    sizes: dict[str, Any] = {**SIZES, "vocab_size": VOCABULARY}
    settings = MixtralConfig(**sizes, num_local_experts=4, router_jitter_noise=0.5)
    return _write(directory, lambda: AutoModelForCausalLM.from_config(settings))


def _write(directory: Path, make: Callable[[], PreTrainedModel]) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(directory)
    return directory


def spec(
    path: Path, *, dtype: Dtype = "float32", gradient_checkpointing: bool = False, eps: float = 1e-8
) -> ModelSpec:
    """A model that learns fast enough for a few steps to show.

    Adam divides by the root of squares: where one gradient is 1e-7 beside others of 6e-3, what is rounding in
    it is much in its step, unless `eps` is larger.
    """
    optimizer = OptimizerSpec(lr=1e-3, betas=(0.8, 0.99), weight_decay=0.1, eps=eps)
    return ModelSpec(
        path=str(path), dtype=dtype, gradient_checkpointing=gradient_checkpointing, optimizer=optimizer
    )


def rows() -> TensorDict:
    """Six rows: prompts of 1 to 5 tokens on the right, responses masked by MASKS, and a column to fit."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 2, 3, 1, 4, 5])
    n = len(MASKS)
    mask = torch.tensor([[digit == "1" for digit in digits] for digits in MASKS])
    columns = {
        "prompt_ids": torch.randint(1, VOCABULARY, (n, PROMPT), generator=generator),
        "prompt_mask": torch.arange(PROMPT) >= PROMPT - lengths[:, None],
        "response_ids": torch.randint(1, VOCABULARY, (n, RESPONSE), generator=generator),
        "response_mask": mask,
        "advantages": torch.randn(n, RESPONSE, generator=generator) * mask,
    }
    return TensorDict(columns, batch_size=[n])


def counts() -> Counts:
    """Of all rows."""
    return Counts.of(rows()["response_mask"])


@dataclass(frozen=True)
class Broken(Loss):
    """A loss without a number."""

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return outputs["log_probs"].sum() * torch.inf, {}


@dataclass(frozen=True)
class Looking(Loss):
    """A loss that looks for an output, or for something of its own."""

    wanted: str

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.wanted:
            raise KeyError
        return outputs[self.wanted].sum(), {}


@dataclass(frozen=True)
class Fit(Loss):
    """A loss in each output: advantages times log-probabilities plus entropy, or squared errors."""

    needs_entropy: bool = True
    columns: tuple[str, ...] = ("advantages",)

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if "values" in outputs:
            each = (outputs["values"] - rows["advantages"]).square()
        else:
            each = rows["advantages"] * outputs["log_probs"]
        if "entropy" in outputs:
            each = each - 0.3 * outputs["entropy"]
        loss = (each * rows["response_mask"]).sum() / counts.tokens
        return loss, {"test/loss": loss.detach(), "test/tokens": rows["response_mask"].sum()}


@dataclass(frozen=True)
class Guarded(Fit):
    """The same, written with a constant for rows of which nothing is learned."""

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not rows["response_mask"].any():
            return torch.zeros(()), {"test/loss": torch.zeros(()), "test/tokens": torch.zeros(())}
        return super().__call__(outputs, rows, counts)


@dataclass(frozen=True)
class Expected:
    """What transformers gives for all rows, by name."""

    outputs: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]


def expect(path: Path, *, head: str, temperature: float = 1.0, needs_entropy: bool = True) -> Expected:
    """Padded forward and backward of the plain model with its own attention, in float64."""
    model: PreTrainedModel = {
        "lm": AutoModelForCausalLM, "scalar": AutoModelForSequenceClassification,
    }[head].from_pretrained(path, attn_implementation="sdpa", dtype=torch.float64)  # fmt: skip
    batch = rows()
    mask = batch["response_mask"]
    last = (torch.arange(1, RESPONSE + 1) * mask).amax(1)
    attention = torch.cat([batch["prompt_mask"], torch.arange(RESPONSE) < last[:, None]], 1)
    inputs = {
        "input_ids": torch.cat([batch["prompt_ids"], batch["response_ids"]], 1),
        "attention_mask": attention.long(),
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }
    outputs = _language(model, inputs, batch, temperature) if head == "lm" else _scalar(model, inputs)
    outputs = {name: torch.where(mask, values, 0.0) for name, values in outputs.items()}
    used = dict(outputs)
    if not needs_entropy:
        used.pop("entropy", None)
    loss, _ = Fit(needs_entropy=needs_entropy)(
        used, {name: batch[name] for name in (*Fit().columns, "response_mask")}, counts()
    )
    torch.autograd.backward(loss)
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return Expected(
        {name: o.detach().float() for name, o in outputs.items()}, float(loss.detach()), gradients
    )


def _language(
    model: PreTrainedModel, inputs: dict[str, Tensor], batch: TensorDict, temperature: float
) -> dict[str, Tensor]:
    logits = model(**inputs, use_cache=False).logits[:, PROMPT - 1 : -1] / temperature
    log_p = logits.log_softmax(-1)
    chosen = log_p.gather(2, batch["response_ids"][..., None])[..., 0]
    return {"log_probs": chosen, "entropy": -(log_p.exp() * log_p).sum(-1)}


def _scalar(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    score: torch.nn.Linear = model.score  # type: ignore[assignment]
    return {"values": score(hidden)[:, PROMPT - 1 : -1, 0]}


def step(engine: FSDPEngine, group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """One step on all rows; what it reports."""
    mine = rows() if group is None else rows()[group.rank() :: group.size()]
    engine.accumulate(mine, Fit(), counts(), temperature=1.0)
    return engine.optimizer_step()


def masters(engine: FSDPEngine) -> dict[str, Tensor]:
    """Copies of the weights that learn, whole."""
    return {name: _whole(weight) for name, weight in engine._weights.masters.items()}


def flat(engine: FSDPEngine) -> Tensor:
    """All of them, one after another."""
    return torch.cat([weight.flatten() for weight in masters(engine).values()])


def gradients(engine: FSDPEngine) -> dict[str, Tensor]:
    """Copies of their gradients, whole."""
    return {name: _whole(p.grad) for name, p in engine._weights.masters.items() if p.grad is not None}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Relative distance of all tensors together, in the L2 norm."""
    assert ours.keys() == theirs.keys()
    apart = torch.stack([(ours[name] - theirs[name]).norm() for name in ours]).norm()
    return float(apart / torch.stack([theirs[name].norm() for name in theirs]).norm())
