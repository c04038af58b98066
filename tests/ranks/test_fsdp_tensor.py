"""Layers divided over tensor ranks learn, say and keep what whole ones do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rlhf_lightning.engines import FSDP, PARTS, FSDPEngine, Head, Transition
from rlhf_lightning.engines.head import Asked
from rlhf_lightning.engines.huggingface.tensor_plan import check_plan
from rlhf_lightning.parallel import ModelGroups, ParallelLayout
from rlhf_lightning.spec import ModelSpec
from tests.unit import spmd
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Fit

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "pad_token_id": 88,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "qwen2": Qwen2Config(**{**SIZES, "tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**{**SIZES, "vocab_size": 89}, head_dim=16),
    "olmo": OlmoConfig(**SIZES),
    "critic": LlamaConfig(**{**SIZES, "num_labels": 1}),
}
"""Biases on both sides; a tied output layer; norms of heads and an uneven vocabulary; nothing that ranks have
whole; a value head."""
SAME = 3e-5
"""Of any weight, after steps of 1e-3."""
LAZY = FSDP(max_tokens_per_micro_batch=20)
EAGER = FSDP(
    max_tokens_per_micro_batch=20, shard=1, reshard_after_forward=True, defer_gradient_reduction=False
)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    """The models with random weights, norms and biases too."""
    directory = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        kind = AutoModelForCausalLM if head(name) == "lm" else AutoModelForSequenceClassification
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = kind.from_config(config)  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 0.3)
        model.save_pretrained(directory / name)
    return {name: tiny.spec(directory / name) for name in MODELS}


def head(name: str) -> Head:
    return "scalar" if name == "critic" else "lm"


def rows() -> TensorDict:
    """Six rows, with the padding token among the prompts."""
    found = tiny.rows()
    found["prompt_ids"][0, -2] = SIZES["pad_token_id"]
    return found


@dataclass
class Place:
    """This rank in a layout of t tensor ranks."""

    group: dist.ProcessGroup | None
    t: int = 1

    def __post_init__(self) -> None:
        self.d = 1 if self.group is None else self.group.size() // self.t
        self.groups = (
            None if self.group is None else ModelGroups.create_all(ParallelLayout(t=self.t, d=self.d))
        )
        self.rows = rows() if self.group is None else rows()[self.group.rank() // self.t :: self.d]

    def engine(self, spec: ModelSpec, head: Head = "lm", config: FSDP = LAZY) -> FSDPEngine:
        if self.groups is None:
            return FSDPEngine(spec, head=head, config=config)
        data, tensor = self.groups.data, self.groups.tensor
        return FSDPEngine(spec, head=head, group=data, tensor=tensor, config=config)

    def step(self, engine: FSDPEngine) -> float:
        loss = Fit(needs_entropy=engine._head == "lm")
        engine.accumulate(self.rows, loss, tiny.counts(), temperature=1.0)
        return engine.optimizer_step()["grad_norm"]


@dataclass
class Trained:
    """What an engine said and became."""

    outputs: dict[str, Tensor]
    norms: list[float]
    weights: Tensor
    names: list[str]
    gathered: Tensor
    """The parameters of the module that generates."""
    bytes: dict[str, int]
    transition: Transition


def trained(place: Place, specs: dict[str, ModelSpec], config: FSDP) -> dict[str, Trained]:
    """Two steps of each model."""
    found = {}
    for name, spec in specs.items():
        engine = place.engine(spec, head(name), config)
        outputs = engine.infer(place.rows, temperature=0.7, asked=Asked(entropy=True, likeliest=3))
        norms = [place.step(engine) for _ in range(2)]
        whole = {name: weight.clone() for name, weight in engine.weights()}
        with engine.gathered() as module:
            gathered = torch.cat([p.flatten() for p in module.parameters()])
        flat = torch.cat([weight.flatten() for weight in whole.values()])
        if head(name) == "lm":
            with engine.generating():
                pass
        torch.testing.assert_close(engine.give_weights(), flat, rtol=0, atol=0)
        said = {str(key): outputs[str(key)] for key in outputs.keys()}  # noqa: SIM118 - it iterates over rows
        found[name] = Trained(said, norms, flat, list(whole), gathered, engine.memory(), engine.transition())
    return found


@pytest.mark.parametrize(
    ("world", "config", "names"),
    [(2, LAZY, ["olmo", "critic"]), (2, EAGER, ["qwen3"]), (4, LAZY, ["qwen2"]), (4, EAGER, ["llama"])],
)
def test_divided_layers_learn_what_whole_ones_do(
    specs: dict[str, ModelSpec], world: int, config: FSDP, names: list[str]
) -> None:
    """(t=2, d=1) and (t=2, d=2); `EAGER` has copies, frees and reduces as often as it can, and recomputes.

    Most of it is what torch works out for each shape that ranks meet first, so each model is in one.
    """
    chosen = {name: specs[name] for name in names}
    expected = trained(Place(None), chosen, config)
    divided = {name: replace(one, gradient_checkpointing=config is EAGER) for name, one in chosen.items()}
    ranks = spmd.run(world, lambda group: trained(Place(group, t=2), divided, config))
    for rank, name in ((rank, name) for rank in range(world) for name in names):
        ours, alone = ranks[rank][name], expected[name]
        for key, values in alone.outputs.items():
            torch.testing.assert_close(ours.outputs[key], values[rank // 2 :: world // 2], rtol=0, atol=1e-5)
        assert ours.norms == pytest.approx(alone.norms, rel=1e-5)
        # Adam divides by the root of squares: rounding in a gradient of almost 0 can be much of a step.
        torch.testing.assert_close(ours.weights, alone.weights, rtol=0, atol=SAME)
        assert (ours.weights - alone.weights).norm() < 1e-6 * alone.weights.norm()
        assert torch.equal(ours.weights, ranks[0][name].weights)
        assert torch.equal(ours.gathered, ours.weights)
        assert ours.names == alone.names
    share = 4 if config.shard == 0 and world == 4 else 2
    for name in {"llama", "olmo", "qwen2"} & chosen.keys():
        part = expected[name].bytes["optimizer"] / share
        assert ranks[0][name].bytes["optimizer"] == pytest.approx(part, rel=0.05)
        whole = 4 * len(expected[name].weights)
        assert ranks[0][name].transition.generation_bytes == whole
        assert ranks[0][name].transition.received_bytes == pytest.approx(whole * (1 - 1 / share), rel=0.05)


def in_bfloat16(place: Place, spec: ModelSpec) -> tuple[list[float], Tensor]:
    """Norms of three steps, and how far the weights moved."""
    engine = place.engine(spec)
    assert {weight.dtype for _, weight in engine.weights()} == {torch.bfloat16}
    before = engine.give_weights()
    return [place.step(engine) for _ in range(3)], engine.give_weights() - before


def test_divided_layers_learn_in_bfloat16_too(specs: dict[str, ModelSpec]) -> None:
    """As whole ones do but for rounding, which sums of parts do elsewhere."""
    spec = tiny.spec(Path(specs["qwen2"].path), dtype="bfloat16", eps=1e-3)
    norms, moved = in_bfloat16(Place(None), spec)
    (ours, found), (theirs, same) = spmd.run(2, lambda group: in_bfloat16(Place(group, t=2), spec))
    assert ours == theirs == pytest.approx(norms, rel=1e-2)
    assert float((found - moved).norm() / moved.norm()) < 0.02
    assert torch.equal(found, same)


def kept(place: Place, spec: ModelSpec, directory: Path, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights as saved or read, a step later, and as they follow others; parts are away in between."""
    engine = place.engine(spec)
    if directory.exists():
        engine.load(directory)
    else:
        place.step(engine)
        engine.save(directory)
        engine.export(directory / "export")
    before, size = engine.give_weights(), engine.memory()
    engine._offloaded.frees = True
    engine.offload(PARTS)
    assert engine.memory()["host"] == sum(size[part] for part in PARTS) > 0
    engine.reload(PARTS)
    place.step(engine)
    after = engine.give_weights()
    engine.follow_weights(given, decay=0.25)
    torch.testing.assert_close(engine.give_weights(), 0.25 * after + 0.75 * given, rtol=0, atol=1e-6)
    return before, after, engine.give_weights()


@pytest.mark.parametrize(("writer", "reader"), [(1, 6), (2, 1)])
def test_a_checkpoint_continues_in_other_layouts(
    specs: dict[str, ModelSpec], tmp_path: Path, writer: int, reader: int
) -> None:
    """Of whole layers in divided ones, and the reverse; rows that do not divide by d = 3 too."""
    spec, directory = specs["qwen2"], tmp_path / "checkpoint"
    given = torch.randn(len(FSDPEngine(spec).give_weights()), generator=torch.Generator().manual_seed(0))

    def run(world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        if world == 1:
            return [kept(Place(None), spec, directory, given)]
        return spmd.run(world, lambda group: kept(Place(group, t=2), spec, directory, given))

    before, after, followed = run(writer)[0]
    exported = FSDPEngine(tiny.spec(directory / "export")).give_weights()
    assert torch.equal(exported, before)
    for read, continued, following in run(reader):
        assert torch.equal(read, before)
        torch.testing.assert_close(continued, after, rtol=0, atol=SAME)
        torch.testing.assert_close(following, followed, rtol=0, atol=SAME)


def apart(place: Place, spec: ModelSpec) -> Tensor:
    """Weights after a step in which whole parameters have other gradients on each rank, as of rounding."""
    engine = place.engine(spec)
    engine.accumulate(place.rows, Fit(), tiny.counts(), temperature=1.0)
    assert place.group is not None
    for name in ("norm.weight", "layers.0.self_attn.o_proj.bias"):  # of no divided layer, and of one
        gradient = engine._weights.masters[f"model.{name}"].grad
        assert gradient is not None
        gradient.mul_(1 + 0.1 * place.group.rank())
    engine._weights.masters["model.layers.1.input_layernorm.weight"].grad = None  # as of one that is not used
    engine.optimizer_step()
    return engine.give_weights()


def test_tensor_ranks_cannot_drift_apart(specs: dict[str, ModelSpec]) -> None:
    first, second = spmd.run(2, lambda group: apart(Place(group, t=2), specs["llama"]))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("config", "t", "message"),
    [
        (LlamaConfig(**SIZES), 4, "4 does not divide the 2 key-value heads. Try 1, 2."),
        (
            LlamaConfig(**SIZES),
            3,
            "3 does not divide the 4 attention heads and the 2 key-value heads. Try 1, 2.",
        ),
        (
            Qwen2Config(**{**SIZES, "intermediate_size": 97}),
            2,
            "2 does not divide the 97 columns of the feed-forward layers. Try 1.",
        ),
        (GPT2Config(), 2, "'gpt2': transformers has no plan that divides its layers. Try tensor=1, or a"),
        (
            PhiConfig(**SIZES, qk_layernorm=True),
            2,
            "its plan leaves out layers.0.self_attn.q_layernorm.weight, which would see a part of a layer",
        ),
        (
            Phi3Config(**SIZES),
            2,
            "its plan divides layers as colwise_gather_output, rowwise_split_input, and",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(config: PreTrainedConfig, t: int, message: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"^strategy.settings.train.tensor={t} for model_type=.*{message}"):
        check_plan(model, t)
    check_plan(model, 1)
