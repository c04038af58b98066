from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.native import slots
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.engines.native.fused import decoder_of
from rlhf_lightning.engines.native.generator import NativeGenerator
from rlhf_lightning.engines.native.kv import Decode, Prefill
from rlhf_lightning.engines.packed.attention import use_interface
from rlhf_lightning.spec import Sampling
from tests.unit.engines.decoders import (
    KINDS,
    MIXED,
    NARROW,
    ORIGINAL,
    VOCAB,
    WIDE,
    agree,
    decoder,
    reference,
    table,
    token_lists,
)

PAD = 0
LENGTHS = [3, 9, 1, 12, 9, 5, 2]
STOPS = tuple(range(1, 9))
"""So many that some rows end early and some do not."""


def generate(
    module: PreTrainedModel,
    rows: TensorDict,
    sampling: Sampling,
    *,
    config: Native | None = None,
    eos_token_ids: tuple[int, ...] = (),
    seed: int = 5,
) -> TensorDict:
    use_interface(module)
    ends = Ends(pad_token_id=PAD, eos_token_ids=eos_token_ids)
    generator = NativeGenerator(decoder_of(module), device="cpu", ends=ends, config=config)
    return generator.generate(rows, sampling=sampling, seed=seed)


def greedy(module: PreTrainedModel, prompt: Tensor, count: int) -> Tensor:
    """What transformers' own `generate` says."""
    say = cast(Callable[..., Tensor], module.generate)
    mask = torch.ones(1, len(prompt))
    ids = say(prompt[None], attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=PAD)
    return ids[0, len(prompt) :]


@pytest.mark.parametrize("kind", [*KINDS, *NARROW, MIXED])
def test_greedy_is_what_transformers_generates(kind: str) -> None:
    module, prompts = decoder(kind), token_lists(LENGTHS[:4])
    expected = [greedy(module, prompt, 12) for prompt in prompts]
    out = generate(module, table(prompts), Sampling(max_new_tokens=12, temperature=0), config=Native(slots=3))
    assert torch.equal(out["response_ids"], torch.stack(expected))
    assert out["response_mask"].all()


@pytest.mark.parametrize(
    "sampling", [Sampling(max_new_tokens=11), Sampling(max_new_tokens=11, temperature=0.6, top_k=9)]
)
@pytest.mark.parametrize("kind", [*KINDS, *NARROW])
def test_log_probs_are_those_of_a_whole_forward(kind: str, sampling: Sampling) -> None:
    module, prompts = decoder(kind), token_lists(LENGTHS)
    out = generate(module, table(prompts), sampling, eos_token_ids=STOPS)
    module.set_attn_implementation("eager")
    for row, prompt in enumerate(prompts):
        length = int(out["response_mask"][row].sum())
        response = out["response_ids"][row, :length]
        with torch.no_grad():
            logits = reference(module, torch.cat([prompt, response]))[len(prompt) - 1 : -1]
        expected = (logits / sampling.temperature).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(out["log_probs"][row, :length], expected, atol=1e-5, rtol=0)
        assert not out["log_probs"][row, length:].any()
        assert (out["response_ids"][row, length:] == PAD).all()


CONFIGS = [
    Native(slots=2, refill=1),
    Native(slots=3, refill=2, prefill_tokens=10),
    Native(slots=1),
    Native(slots=5, refill=5),
    Native(prefill_tokens=1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_slots_change_nothing(kind: str, config: Native) -> None:
    module, rows = decoder(kind), table(token_lists(LENGTHS))
    sampling = Sampling(max_new_tokens=13)
    together = generate(module, rows, sampling, eos_token_ids=STOPS)
    assert len(set(together["response_mask"].sum(1).tolist())) > 3
    agree(generate(module, rows, sampling, eos_token_ids=STOPS, config=config), together)


def test_order_and_company_change_nothing() -> None:
    module, rows = decoder("llama"), table(token_lists(LENGTHS))
    sampling = Sampling(max_new_tokens=9, top_p=0.9)
    out = generate(module, rows, sampling)
    order = torch.tensor([4, 2, 6, 0, 5, 1, 3])
    agree(generate(module, rows[order], sampling), out[order])
    for row in range(len(rows)):
        agree(generate(module, rows[row : row + 1], sampling), out[row : row + 1])


def test_seed_and_row_id_decide() -> None:
    module = decoder("llama")
    prompts = [token_lists([6])[0]] * 4
    sampling = Sampling(max_new_tokens=8)
    out = generate(module, table(prompts), sampling)["response_ids"]
    assert len({tuple(row) for row in out.tolist()}) == 4
    assert torch.equal(generate(module, table(prompts, first_id=101), sampling)["response_ids"][:3], out[1:])
    assert not torch.equal(generate(module, table(prompts), sampling, seed=6)["response_ids"], out)


def test_shared_prompts_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = decoder("mistral")
    first, second = token_lists([6, 4])
    rows = table([first, second, first, second, first])
    sampling = Sampling(max_new_tokens=7)
    apart = torch.cat([generate(module, rows[row : row + 1], sampling)["response_ids"] for row in range(5)])
    widths: list[int] = []
    hook = module.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: widths.append(ids[0].shape[1])
    )
    together = generate(module, rows, sampling)
    hook.remove()
    assert torch.equal(together["response_ids"], apart)
    assert widths == [10] + [5] * 6


def test_prompts_go_together_up_to_the_budget_and_a_longer_one_alone() -> None:
    module, fed = decoder("mistral"), list[int]()
    module.get_input_embeddings().register_forward_pre_hook(lambda _, ids: fed.append(ids[0].shape[1]))
    rows, once = table(token_lists([3, 7, 4, 12, 1, 2])), Sampling(max_new_tokens=1)
    generate(module, rows, once, config=Native(prefill_tokens=10))
    assert fed == [3 + 7, 4, 12, 1 + 2]


def test_a_stop_token_ends_its_row() -> None:
    module, rows = decoder("llama"), table(token_lists(LENGTHS))
    free = generate(module, rows, Sampling(max_new_tokens=16))["response_ids"]
    stops = (int(free[0, 4]), int(free[3, 0]))
    out = generate(
        module, rows, Sampling(max_new_tokens=16, stop_token_ids=stops[:1]), eos_token_ids=stops[1:]
    )
    for row, tokens in enumerate(free.tolist()):
        ends = [column + 1 for column, token in enumerate(tokens) if token in stops]
        length = min(ends, default=16)
        assert out["response_mask"][row].tolist() == [True] * length + [False] * (16 - length)
        assert out["response_ids"][row].tolist() == tokens[:length] + [PAD] * (16 - length)


def test_finished_rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module, rows = decoder("llama"), table(token_lists(LENGTHS))
    fed: list[int] = []
    attended: list[int] = []
    view = Decode._view

    def spy(self: Decode, window: int) -> tuple[int, int, Tensor | None]:
        begin, end, mask = view(self, window)
        fed.append(len(self._position))
        attended.append(end)
        return begin, end, mask

    monkeypatch.setattr(Decode, "_view", spy)
    out = generate(module, rows, Sampling(max_new_tokens=40), eos_token_ids=STOPS)
    lengths = out["response_mask"].sum(1)
    assert fed == [int((lengths > step).sum()) for step in range(1, int(lengths.max()))]
    assert attended[0] < 32 < 12 + 40


def test_refill_waits_for_enough_free_slots() -> None:
    module, rows = decoder("mistral"), table(token_lists(LENGTHS))
    calls: list[tuple[type, int]] = []

    def spy(_: nn.Module, ids: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
        calls.append((type(options["sequences"]), options["input_ids"].shape[1]))

    module.register_forward_pre_hook(spy, with_kwargs=True)
    prefills, decodes = [], []
    for refill in (1, 3):
        calls.clear()
        config = Native(slots=3, refill=refill)
        out = generate(module, rows, Sampling(max_new_tokens=20), config=config, eos_token_ids=STOPS)
        # Every prompt is fed once, and every token said but a row's last.
        assert sum(width for _, width in calls) == sum(LENGTHS) + int(out["response_mask"].sum()) - len(rows)
        prefills.append(sum(kind is Prefill for kind, _ in calls))
        decodes.append(sum(kind is Decode for kind, _ in calls))
    assert prefills[0] > prefills[1] == 3
    assert decodes[0] < decodes[1]


@pytest.mark.parametrize("config", [None, Native(slots=2)], ids=str)
def test_responses_of_one_token_are_whole(config: Native | None) -> None:
    out = generate(decoder("llama"), table(token_lists(LENGTHS)), Sampling(max_new_tokens=1), config=config)
    assert out["response_ids"].shape == (7, 1)
    assert out["response_mask"].all()


def test_no_rows_give_empty_columns() -> None:
    out = generate(decoder("llama"), table([]), Sampling(max_new_tokens=4))
    assert out.batch_size == (0,)
    assert {name: (x.shape, x.dtype) for name, x in out.items()} == {
        "response_ids": ((0, 4), torch.int64),
        "response_mask": ((0, 4), torch.bool),
        "log_probs": ((0, 4), torch.float32),
    }


def test_tokens_follow_the_distribution() -> None:
    module, prompt = decoder("qwen2"), token_lists([5])[0]
    out = generate(module, table([prompt] * 4000), Sampling(max_new_tokens=1))
    with torch.no_grad():
        module.set_attn_implementation("eager")
        expected = reference(module, prompt)[-1].softmax(-1) * 4000
    seen = torch.bincount(out["response_ids"][:, 0], minlength=VOCAB)
    common = expected > 5
    statistic = ((seen - expected)[common] ** 2 / expected[common]).sum() / common.sum()
    assert float(statistic) < 1.7


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16"])
def test_a_cache_rounds_in_bfloat16_only(cache_dtype: str) -> None:
    module, rows = decoder("llama"), table(token_lists(LENGTHS))
    sampling = Sampling(max_new_tokens=6)
    exact = generate(module, rows, sampling)
    config = Native(cache_dtype="float32" if cache_dtype == "float32" else "bfloat16")
    out = generate(module, rows, sampling, config=config)
    if cache_dtype == "float32":
        agree(out, exact)
    else:
        # The first token never reads the cache; later ones see keys rounded to 8 bits.
        assert torch.equal(out["response_ids"][:, 0], exact["response_ids"][:, 0])
        assert not torch.equal(out["log_probs"], exact["log_probs"])


def test_bfloat16_weights_give_float32_log_probs() -> None:
    module, rows = decoder("mistral").bfloat16(), table(token_lists(LENGTHS))
    out = generate(module, rows, Sampling(max_new_tokens=8))
    assert out["log_probs"].dtype == torch.float32
    assert out["log_probs"].isfinite().all()


def test_the_module_is_left_as_it_was() -> None:
    module, rows = decoder("gpt2"), table(token_lists(LENGTHS))
    out = generate(module, rows, Sampling(max_new_tokens=5))
    assert not out["log_probs"].requires_grad
    assert all(not parameter.is_inference() and parameter.grad is None for parameter in module.parameters())


def test_long_and_empty_prompts_are_refused() -> None:
    module = decoder("gpt2")
    with pytest.raises(ValueError, match=r"row 101: its prompt of 50 tokens .* than 44 tokens, .*`step`"):
        generate(module, table(token_lists([44, 50])), Sampling(max_new_tokens=20))
    generate(module, table(token_lists([44])), Sampling(max_new_tokens=20))
    with pytest.raises(ValueError, match=r"row 101: its prompt is empty"):
        generate(module, table(token_lists([4, 0])), Sampling(max_new_tokens=20))
    mixed = table(token_lists([4]))
    mixed["prompt_ids"] = torch.ones(1, 9, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^prompt_ids are \[1, 9\] and prompt_mask \[1, 5\]: .*_columns\("):
        generate(module, mixed, Sampling(max_new_tokens=2))
    with pytest.raises(ValueError, match=r"max_new_tokens=64: the model has 64 positions.*Try 32"):
        generate(module, table(token_lists([4])), Sampling(max_new_tokens=64))


def test_rows_of_a_model_with_two_sets_of_factors_stay_where_one_holds() -> None:
    module, rows = decoder("phi3"), table(token_lists([4, 9]))
    sampling = Sampling(max_new_tokens=ORIGINAL - 9)
    agree(generate(module, rows[:1], sampling), generate(module, rows, sampling)[:1])
    with pytest.raises(ValueError, match=r"row 101: .* exceed the 16 positions .* LongRoPE, of which orig"):
        generate(module, rows, Sampling(max_new_tokens=ORIGINAL - 8))


def test_a_layer_that_attends_twice_is_refused() -> None:
    module = decoder("mistral")
    for layer in module.get_decoder().layers:
        layer.self_attn.layer_idx = 0
    with pytest.raises(ValueError, match="layer 0 computes attention twice"):
        generate(module, table(token_lists([4])), Sampling(max_new_tokens=2))


def test_wrong_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^strategy.settings.generate.slots=-1"):
        Native(slots=-1)
    with pytest.raises(ValueError, match=r"^strategy.settings.generate.refill=0"):
        Native(refill=0)


def test_keys_and_values_are_in_no_second_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.cache_utils.Cache.update", lambda *_, **__: pytest.fail("it is filled"))
    generate(decoder("mistral"), table(token_lists([3])), Sampling(max_new_tokens=2))


@pytest.mark.parametrize("kind", [*KINDS, WIDE, *NARROW])
@pytest.mark.parametrize("dtype", ["model", "bfloat16"])
def test_a_decoder_says_what_its_cache_takes(
    kind: str, dtype: Literal["model", "bfloat16"], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Cache] = []

    class Noted(Cache):
        def __init__(self, slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
            super().__init__(slots, capacity, dtype=dtype)
            made.append(self)

    monkeypatch.setattr(slots, "Cache", Noted)
    module = decoder(kind)
    generate(module, table(token_lists([3, 5])), Sampling(max_new_tokens=4), config=Native(cache_dtype=dtype))
    taken = sum(block.nbytes for blocks in made[0].layers.values() for block in blocks)
    chosen = None if dtype == "model" else torch.bfloat16
    assert taken == made[0].slots * made[0].capacity * decoder_of(module).kv_bytes_per_token(chosen)


def test_a_gpu_has_as_many_slots_as_it_has_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = decoder(KINDS[0])
    use_interface(module)
    found = decoder_of(module)
    row = 50 * found.kv_bytes_per_token(None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6 * row, 100 * row))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 12 * row)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 8 * row)
    generator = NativeGenerator(found, device="cuda", ends=Ends(pad_token_id=0))
    assert [generator._most_slots(capacity) for capacity in (50, 25, 100_000)] == [7, 14, 1]
