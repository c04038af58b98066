"""One rank of a sharded decoder: what its weights are, and where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.engines.native.decoder import WholeDecoder
from rlhf_lightning.engines.native.fused import decoder_of
from rlhf_lightning.engines.native.kv import Prefill
from rlhf_lightning.engines.native.sharded import ShardedDecoder
from rlhf_lightning.engines.packed.attention import Packed, use_interface
from rlhf_lightning.parallel import Generation, ParallelLayout
from tests.ranks.test_sharded import GREEDY, KINDS, Case, answers, expected, whole
from tests.unit.engines.decoders import token_lists
from tests.unit.engines.generation_shard import generation_shard


def one_sequence(length: int) -> Prefill:
    slot = torch.zeros(length, dtype=torch.int64)
    return Prefill(Packed([length]), Cache(1, length), slot=slot, position=torch.arange(length))


def alone(
    kind: str, *, k: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[ShardedDecoder, dict[str, Tensor]]:
    """A decoder of one rank and its weights."""
    case = Case(kind, 1, 1, k)
    weights = {name: weight.to(dtype) for name, weight in case.shard(0, 0).items()}
    made = ShardedDecoder(case.conversion, weights, layers=case.stages, chunks=k, tensor=None, pipeline=None)
    return made, weights


class _Made(TorchDispatchMode):
    """Notes the size of every block of memory that an operation fills."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: list[int] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.bytes.append(x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_its_cache_takes(kind: str) -> None:
    """The module's own decoder is held to what its cache takes in tests/unit/engines/test_native.py."""
    text = whole(kind).config
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    expected = 2 * text.num_hidden_layers * text.num_key_value_heads * size
    found = alone(kind)[0].kv_bytes_per_token
    assert (found(None), found(torch.bfloat16)) == (4 * expected, 2 * expected)


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_is_copied(kind: str) -> None:
    decoder, weights = alone(kind, k=4)
    held = [
        decoder._embedding,
        decoder._norm,
        decoder._output,
        *(w for x in decoder._layers.values() for w in x),
    ]
    assert {w.data_ptr() for w in held if w is not None} == {w.data_ptr() for w in weights.values()}
    with _Made() as made:
        decoder(torch.tensor([1]), torch.tensor([0]), one_sequence(1))
    matrices = [w.nbytes for w in weights.values() if w.dim() == 2]
    assert len(made.bytes) > 20
    assert max(made.bytes) < min(matrices)


def test_a_generation_shard_is_its_training_shards_one_behind_the_other() -> None:
    layout = ParallelLayout(p=2, t=4, generation=Generation(2, 2)).generating
    case = Case("qwen2", 2, 2, 2)
    parameters = dict(whole("qwen2").named_parameters(remove_duplicate=False))
    seen = set()
    for rank in range(8):
        at = layout.train.coordinate(rank)
        shard = generation_shard(
            case.conversion, parameters.__getitem__, layout=layout, stages=case.stages, rank=rank
        )
        for param in case.conversion.parameters:
            if param.name not in shard:
                continue
            complete = case.conversion.from_hugging_face(param, parameters.__getitem__)
            memory = shard[param.name].t() if param.dim == 1 else shard[param.name]
            assert memory.is_contiguous()
            piece = memory if param.dim is None else memory.chunk(2)[at.t % 2]
            right = param.shard(complete, 4, at.t)
            assert torch.equal(piece, right.t() if param.dim == 1 else right)
            seen.add((at.p, param.name))
    assert {name for p, name in seen if p == 1 and "layers" not in name} == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
    }


def test_in_bfloat16_logits_are_those_of_the_whole_model() -> None:
    decoder, weights = alone("qwen2", dtype=torch.bfloat16)
    assert len(weights) == len(Case("qwen2", 1, 1, 1).conversion.parameters)
    ids, places = token_lists([7])[0], torch.arange(7)
    logits = decoder(ids, places, one_sequence(7))
    assert logits is not None
    with torch.no_grad():
        right = WholeDecoder(whole("qwen2"))(ids, places, one_sequence(7))
    assert right is not None
    assert logits.dtype == torch.bfloat16
    assert float((logits - right).norm() / right.norm()) < 0.02


def changed(**options: object) -> tuple[PreTrainedModel, ShardedDecoder]:
    """The Qwen2 with another configuration and the same weights: whole, and as a decoder."""
    kind = {name: value for name, value in KINDS["qwen2"].items() if name != "model_type"}
    config = AutoConfig.for_model("qwen2", **kind, **options)
    module = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    module.load_state_dict(whole("qwen2").state_dict())
    use_interface(module.train(False))
    weights, layers = alone("qwen2")[1], ((0, 1, 2),)
    decoder = ShardedDecoder(Conversion(config), weights, layers=layers, chunks=1, tensor=None, pipeline=None)
    return module, decoder


@pytest.mark.parametrize(
    "options",
    [{"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}, {"hidden_act": "gelu"}],
    ids=["windows", "activation"],
)
def test_it_computes_what_the_configuration_says(options: dict[str, object]) -> None:
    module, decoder = changed(**options)
    found, right = answers(decoder, GREEDY), answers(decoder_of(module), GREEDY)
    torch.testing.assert_close(found["log_probs"], right["log_probs"], atol=1e-4, rtol=0)
    assert not torch.equal(right["log_probs"], expected("qwen2", GREEDY)["log_probs"])


def test_it_is_captured_where_angles_do_not_depend_on_lengths() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert changed()[1].capturable
    assert not changed(rope_parameters=dynamic)[1].capturable
