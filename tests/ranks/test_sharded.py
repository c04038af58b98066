"""Generation in tensor and pipeline shards says what the whole Hugging Face model says."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.native import slots
from rlhf_lightning.engines.native.cache import Cache, Places
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.engines.native.fused import decoder_of
from rlhf_lightning.engines.native.generator import NativeGenerator
from rlhf_lightning.engines.native.ranks import Ranks
from rlhf_lightning.engines.native.sharded import ShardedDecoder
from rlhf_lightning.engines.packed.attention import use_interface
from rlhf_lightning.engines.sampling import sample
from rlhf_lightning.parallel import Generation, GenerationLayout, ModelGroups, ParallelLayout, even_stages
from rlhf_lightning.spec import Sampling
from tests.unit import spmd
from tests.unit.engines.decoders import VOCAB, agree, table, token_lists
from tests.unit.engines.generation_shard import generation_shard
from tests.unit.engines.test_native import PAD

STOPS = tuple(range(16))
LENGTHS = [3, 9, 1, 12, 9, 5, 2]
GREEDY = Sampling(max_new_tokens=7, temperature=0)
DRAWN = Sampling(max_new_tokens=7, temperature=0.8, stop_strings=tuple("!'05"))
_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama"},
    "deep": {**_COMMON, "model_type": "llama", "num_hidden_layers": 5},
    "qwen2": {**_COMMON, "model_type": "qwen2", "tie_word_embeddings": True},
    "one group": {
        **_COMMON,
        "model_type": "llama",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "attention_bias": True,
        "rope_parameters": _SCALED,
    },
    "all groups": {**_COMMON, "model_type": "qwen2", "num_key_value_heads": 4, "num_hidden_layers": 2},
}


@cache
def whole(kind: str) -> PreTrainedModel:
    """Seeded weights, other than 0 in biases and than 1 in norms."""
    torch.manual_seed(0)
    options = dict(KINDS[kind])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    module = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    use_interface(module)
    module.train(False)
    return module


@dataclass(frozen=True)
class Case:
    """A model in pg stages, tg tensor shards and k training shards in each."""

    kind: str
    pg: int
    tg: int
    k: int
    interleaved: int = 1

    @property
    def layout(self) -> GenerationLayout:
        train = ParallelLayout(p=self.pg, t=self.tg * self.k, generation=Generation(self.pg, self.tg))
        return train.generating

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        return even_stages(KINDS[self.kind]["num_hidden_layers"], self.pg, chunks=self.interleaved)

    @property
    def conversion(self) -> Conversion:
        return Conversion(whole(self.kind).config, vocabulary_multiple=self.tg * self.k)

    def shard(self, p: int, t: int) -> dict[str, Tensor]:
        """Of the rank at stage p, tensor rank t of the first copy."""
        layout = self.layout
        at = layout.coordinate(0)._replace(p=p, t=t)
        parameters = dict(whole(self.kind).named_parameters(remove_duplicate=False))
        return generation_shard(
            self.conversion, parameters.__getitem__, layout=layout, stages=self.stages, rank=layout.rank(at)
        )

    def decoder(self) -> ShardedDecoder:
        """Of this rank of a world of pg tg."""
        copy = ParallelLayout(p=self.pg, t=self.tg)
        groups = ModelGroups.create_all(copy)
        at = copy.coordinate(dist.get_rank())
        return ShardedDecoder(
            self.conversion,
            self.shard(at.p, at.t),
            layers=self.stages,
            chunks=self.k,
            tensor=groups.generation_tensor,
            pipeline=groups.generation_pipeline,
        )


def rows() -> TensorDict:
    """Prompts of several lengths, some of them twice."""
    prompts = token_lists(LENGTHS)
    return table([*prompts, prompts[0], prompts[3], prompts[0]])


def answers(decoder: Decoder, sampling: Sampling) -> TensorDict:
    generator = NativeGenerator(
        decoder,
        device="cpu",
        ends=Ends(pad_token_id=PAD, eos_token_ids=STOPS, tokenizer=load_tokenizer("embedded")),
        config=Native(slots=4, refill=2),
    )
    return generator.generate(rows(), sampling=sampling, seed=3)


@cache
def expected(kind: str, sampling: Sampling) -> TensorDict:
    return answers(decoder_of(whole(kind)), sampling)


CASES = [
    Case("llama", 1, 1, 1),
    Case("qwen2", 1, 1, 2),
    Case("one group", 1, 1, 4),
    Case("qwen2", 1, 2, 1),
    Case("llama", 1, 2, 2),
    Case("one group", 1, 2, 4),
    Case("llama", 2, 1, 1),
    Case("qwen2", 2, 1, 2),
    Case("deep", 2, 1, 4, interleaved=2),
    Case("one group", 2, 2, 1),
    Case("deep", 2, 2, 2, interleaved=2),
    Case("qwen2", 2, 2, 4),
    Case("llama", 1, 4, 1),
    Case("all groups", 1, 4, 2),
    Case("one group", 1, 4, 4),
]


@pytest.mark.parametrize(("pg", "tg"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)])
def test_a_copy_says_what_the_whole_model_says(pg: int, tg: int) -> None:
    cases = [case for case in CASES if (case.pg, case.tg) == (pg, tg)]
    assert [case.k for case in cases] == [1, 2, 4]
    for case in cases:
        lengths = expected(case.kind, GREEDY)["response_mask"].sum(1).tolist()
        assert min(lengths) < max(lengths)

    def said(_: dist.ProcessGroup) -> list[list[dict[str, Tensor]]]:
        decoders = [case.decoder() for case in cases]
        return [[dict(answers(each, sampling)) for sampling in (GREEDY, DRAWN)] for each in decoders]

    for ranks in spmd.run(pg * tg, said):
        for case, (greedy, drawn) in zip(cases, ranks, strict=True):
            agree(greedy, expected(case.kind, GREEDY), within=1e-4)
            agree(drawn, expected(case.kind, DRAWN), within=1e-4)


def test_what_a_copy_has_room_for_is_what_its_last_rank_has() -> None:
    def least(_: dist.ProcessGroup) -> int:
        return Case("llama", 2, 2, 1).decoder().least(9 - 2 * dist.get_rank())

    assert spmd.run(4, least) == [3] * 4

    def of_its_own(_: dist.ProcessGroup) -> int:
        group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        return Ranks(group).least(9 - 2 * dist.get_rank())

    assert spmd.run(4, of_its_own) == [7, 7, 3, 3]


def test_stages_exchange_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator of two ranks for what is not in one, in the middle of a run."""
    batches: list[int] = []
    exchange = dist.batch_isend_irecv

    def noted(operations: list[dist.P2POp]) -> list[dist.Work]:
        batches.append(len(operations))
        return exchange(operations)

    def passed_on(group: dist.ProcessGroup) -> tuple[float, list[int]]:
        stages, x = Ranks(group), torch.tensor(float(dist.get_rank() + 1))
        if stages.index > 0:
            x = x * stages.receive(torch.empty(()), stages.index - 1)
        if stages.index < 2:
            stages.send(x, stages.index + 1)
        return float(x), batches

    monkeypatch.setattr(dist, "batch_isend_irecv", noted)
    assert spmd.run(3, passed_on) == [(1.0, [1]), (2.0, [1, 1]), (6.0, [1])]


def test_what_all_ranks_have_is_gathered_without_a_warning() -> None:
    def gathered(group: dist.ProcessGroup) -> list[list[int]]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            found: list[list[int]] = Ranks(group).all_gather(torch.tensor([dist.get_rank()])).tolist()
        return found

    assert spmd.run(2, gathered) == [[[0], [1]]] * 2


def test_a_rank_counts_its_own_keys_and_is_not_captured() -> None:
    def said(_: dist.ProcessGroup) -> list[tuple[int, bool]]:
        decoders = [Case("llama", pg, tg, 1).decoder() for pg, tg in ((2, 2), (1, 4))]
        return [(decoder.kv_bytes_per_token(None), decoder.capturable) for decoder in decoders]

    layer = 2 * 8 * 4  # a key and a value of one head of 8 numbers
    first, last = [(2 * layer, False), (3 * layer, False)], [(layer, False), (3 * layer, False)]
    assert spmd.run(4, said) == [first, first, last, last]


def test_one_rank_draws_and_each_keeps_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[int] = []
    keys: set[tuple[int, int]] = set()
    write = Cache.write

    def drawing(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        draws.append(len(logits))
        return sample(logits, u, sampling)

    def writing(self: Cache, layer: int, key: Tensor, value: Tensor, places: Places) -> None:
        keys.add((layer, key.shape[1]))
        write(self, layer, key, value, places)

    def counted(_: dist.ProcessGroup) -> tuple[int, list[int], set[tuple[int, int]]]:
        generator = NativeGenerator(
            Case("llama", 2, 2, 1).decoder(), device="cpu", ends=Ends(pad_token_id=PAD)
        )
        nothing = generator.generate(table([]), sampling=GREEDY, seed=3)
        assert not keys
        generator.generate(rows(), sampling=GREEDY, seed=3)
        return len(nothing), draws, keys

    monkeypatch.setattr(slots, "sample", drawing)
    monkeypatch.setattr(Cache, "write", writing)
    first, last = {(0, 1), (1, 1)}, {(2, 1)}
    assert spmd.run(4, counted) == [(0, [], first), (0, [], first), (0, [10] * 7, last), (0, [], last)]
