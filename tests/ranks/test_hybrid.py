"""Megatron trains, the actor moves, generates, moves back and trains on, as the whole model on one device.

The pairs of layouts are those of HybridFlow's Figure 8 that need eight ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config

from rlhf_lightning.engines import FSDPEngine, Megatron, NativeGenerator, TrainEngine, Transition
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.engines.native.sharded import ShardedDecoder
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.parallel.reshard import reshard
from rlhf_lightning.parallel.transition import HybridBuffer
from rlhf_lightning.parallel.weights import Weights
from rlhf_lightning.spec import ModelSpec, Sampling
from tests.unit import spmd
from tests.unit.engines import three_d, tiny
from tests.unit.engines.decoders import agree

PROMPTS, PROMPT, NEW, SEED = 9, 5, 6, 7
GREEDY, DRAWN = Sampling(max_new_tokens=NEW, temperature=0.0), Sampling(max_new_tokens=NEW)
_SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    f"{depth}{kind}": make(**_SIZES, num_hidden_layers=layers, tie_word_embeddings=tied)
    for depth, layers in (("", 5), ("shallow ", 2))
    for kind, make, tied in (("llama", LlamaConfig, False), ("qwen2", Qwen2Config, True))
}
"""Fewer key-value heads than tensor shards, five layers over two and four stages, a vocabulary to pad."""


@dataclass(frozen=True)
class Said:
    """What one rank said and did."""

    answers: list[TensorDict]
    """Of its copy: greedy and drawn, and drawn after an optimizer step."""
    transition: Transition
    planned_bytes: int
    trained: Tensor
    """The weights at the end, whole."""
    gives: bool
    """Whether these are the weights that it gives to other engines and exports."""
    viewed: bool
    """Whether in generation every training parameter lay in memory of the generation shard."""
    lends: bool
    """Whether it lends that memory to another engine."""
    shards_bytes: int
    """Bytes of what it trains."""
    left_bytes: int | None
    """Bytes that its engine of transitions held after the last one, where the engine stays."""


def prompts() -> TensorDict:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, PROMPT + 1, (PROMPTS, 1), generator=generator)
    columns = {
        "prompt_ids": torch.randint(1, tiny.VOCABULARY, (PROMPTS, PROMPT), generator=generator),
        "prompt_mask": torch.arange(PROMPT) >= PROMPT - lengths,
        "row_ids": torch.arange(PROMPTS),
    }
    return TensorDict(columns, batch_size=PROMPTS)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    """The models, with biases and norms that are not 0 and 1."""
    directory = tmp_path_factory.mktemp("models")
    return {name: tiny.spec(tiny.write_noisy(directory / name, config)) for name, config in MODELS.items()}


def answer(decoder: Decoder, rows: TensorDict, *samplings: Sampling) -> list[TensorDict]:
    generator = NativeGenerator(decoder, device="cpu", ends=Ends(pad_token_id=0, eos_token_ids=(3, 5, 8)))
    return [generator.generate(rows, sampling=sampling, seed=SEED) for sampling in samplings]


def run(
    engine: TrainEngine, rows: TensorDict, look: Callable[[Decoder], None] = lambda _: None
) -> list[TensorDict]:
    """Answer, learn, look at what answers, answer."""
    with engine.generating() as decoder:
        found = answer(decoder, rows, GREEDY, DRAWN)
        del decoder
    three_d.step(engine, tiny.rows())
    with engine.generating() as decoder:
        look(decoder)
        found += answer(decoder, rows, DRAWN)
        del decoder
    return found


@cache
def expected(spec: ModelSpec) -> tuple[list[TensorDict], Tensor]:
    """Answers of the whole model, and its weights at the end."""
    whole = FSDPEngine(spec)
    return run(whole, prompts()), whole.give_weights()


def computed_with(decoder: ShardedDecoder) -> set[int]:
    """Where the memory of a decoder's weights begins."""
    ends = [decoder._embedding, decoder._norm, decoder._output]
    weights = [*ends, *(weight for layer in decoder._layers.values() for weight in layer)]
    return {weight.untyped_storage().data_ptr() for weight in weights if weight is not None}


def settings(*, chunks: int = 1, distributed_optimizer: bool = False) -> Megatron:
    budget = three_d.BUDGET
    return Megatron(
        max_tokens_per_micro_batch=budget, chunks=chunks, distributed_optimizer=distributed_optimizer
    )


def said(group: dist.ProcessGroup, spec: ModelSpec, layout: ParallelLayout, config: Megatron) -> Said:
    seat, generating = three_d.seat(group, layout), layout.generating
    engine = three_d.megatron(seat, spec, "lm", config)
    mine = torch.arange(PROMPTS).tensor_split(generating.num_replicas)[generating.replica(seat.rank)]
    lying = list[bool]()

    def look(decoder: Decoder) -> None:
        trained = {p.untyped_storage().data_ptr() for p in engine.shards.values()}
        lying.append(trained <= computed_with(cast(ShardedDecoder, decoder)))

    answers = run(engine, prompts()[mine], look)
    moved, hybrid = engine.transition(), engine._hybrid
    assert (hybrid is None) == config.distributed_optimizer
    # Megatron's buffer is one, and whole norms generate in it.
    viewed = lying == [True] and hybrid is not None
    left = None if hybrid is None else hybrid._buffer.size_bytes
    if (lending := engine.lending()) is not None:
        with lending as shard:
            assert shard.tensors
        assert not shard.tensors  # one that is kept holds no memory
    weights = Weights(tuple(engine.conversion.parameters), engine.stages, element_bytes=4)
    planned = reshard(weights, layout).ranks[seat.rank].received_bytes
    trained, size = engine.give_weights(), sum(shard.nbytes for shard in engine.shards.values())
    masters = engine._weights.in_order(trained, path=spec.path)
    same = [torch.equal(value, masters[name]) for name, value in engine.weights()]
    return Said(answers, moved, int(planned), trained, all(same), viewed, lending is not None, size, left)


@pytest.mark.parametrize(
    ("train", "generate", "name"),
    [
        ((1, 4, 2), (1, 2), "shallow llama"),
        ((1, 8, 1), (1, 2), "shallow qwen2"),
        ((2, 4, 1), (1, 2), "qwen2"),
        ((2, 4, 1), (2, 2), "llama"),
        ((4, 2, 1), (2, 1), "qwen2"),
    ],
    ids=lambda given: given if isinstance(given, str) else "".join(map(str, given)),
)
def test_it_answers_as_the_whole_model_does(
    specs: dict[str, ModelSpec], train: tuple[int, int, int], generate: tuple[int, int], name: str
) -> None:
    p, t, d = train
    layout = ParallelLayout(p, t, d, generation=Generation(*generate))
    ranks = spmd.run(layout.num_ranks, said, specs[name], layout, settings())
    assert all(one.viewed and one.lends for one in ranks)
    check(ranks, layout, specs[name])


def test_it_answers_the_same_by_the_vanilla_rule(specs: dict[str, ModelSpec]) -> None:
    spec = specs["shallow qwen2"]
    layout = ParallelLayout(1, 4, 2, generation=Generation(1, 2, "vanilla"))
    ranks = spmd.run(layout.num_ranks, said, spec, layout, settings())
    assert not any(one.viewed or one.lends for one in ranks)
    check(ranks, layout, spec)


def test_it_answers_the_same_in_fewer_stages_than_an_interleaved_pipeline(tmp_path: Path) -> None:
    """Stages of layers 0, 1, 5 and 2, 6 generate as one of 0, 1, 2, 5, 6, which each token passes twice."""
    config = LlamaConfig(**_SIZES, num_hidden_layers=9)
    spec = tiny.spec(tiny.write_noisy(tmp_path, config))
    layout = ParallelLayout(4, 1, 1, generation=Generation(2, 1))
    check(spmd.run(layout.num_ranks, said, spec, layout, settings(chunks=2)), layout, spec)


def test_it_answers_by_what_a_distributed_optimizer_has_learned(specs: dict[str, ModelSpec]) -> None:
    """Its parameters stay in Megatron's buffer; what generates and what is given away are not of before."""
    layout = ParallelLayout(2, 2, 2, generation=Generation(1, 1))
    config = settings(distributed_optimizer=True)
    ranks = spmd.run(layout.num_ranks, said, specs["llama"], layout, config)
    assert not any(one.lends for one in ranks)
    check(ranks, layout, specs["llama"])


def let_go(group: dist.ProcessGroup, spec: ModelSpec, config: Megatron) -> list[bool]:
    """Whether the decoder was gone as the memory of other ranks' parts was freed."""
    engine, found = three_d.megatron(three_d.seat(group, ParallelLayout()), spec, "lm", config), list[bool]()
    alive: list[weakref.ref[Decoder]] = []
    with (
        mock.patch.object(HybridBuffer, "release", side_effect=lambda: found.append(alive[0]() is None)),
        engine.generating() as decoder,
    ):
        alive.append(weakref.ref(decoder))
        del decoder
    return found


@pytest.mark.parametrize("distributed", [False, True])
def test_nothing_holds_the_decoder_as_memory_is_freed(
    specs: dict[str, ModelSpec], *, distributed: bool
) -> None:
    config = settings(distributed_optimizer=distributed)
    assert spmd.run(1, let_go, specs["shallow llama"], config) == [[True]]


def check(ranks: list[Said], layout: ParallelLayout, spec: ModelSpec) -> None:
    """The ranks said what the whole model says, learned what it learns, and received what the plan says."""
    answers, weights = expected(spec)
    torch.testing.assert_close(ranks[0].trained, weights, atol=1e-4, rtol=0)
    copies = layout.generating.output_ranks
    for number, right in enumerate(answers):
        found = cast(
            TensorDict, torch.cat(cast(list[Tensor], [ranks[rank].answers[number] for rank in copies]))
        )
        agree(found, right, within=1e-4)
    for rank, one in enumerate(ranks):
        copy = layout.generating.replica(rank)
        assert torch.equal(one.answers[1]["response_ids"], ranks[copies[copy]].answers[1]["response_ids"])
        moved = one.transition
        assert moved.received_bytes == one.planned_bytes
        if one.left_bytes is not None:
            assert one.left_bytes == moved.training_bytes == one.shards_bytes
        if one.viewed:
            assert moved.generation_bytes == moved.training_bytes + moved.received_bytes
        assert moved.seconds > 0
        assert one.gives
