"""Answers of the native generator that end with a text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tensordict import TensorDict

from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.engines.native.fused import decoder_of
from rlhf_lightning.engines.native.generator import NativeGenerator
from rlhf_lightning.engines.packed.attention import use_interface
from rlhf_lightning.spec import Sampling
from tests.unit.engines.decoders import decoder, table, token_lists
from tests.unit.engines.test_native import CONFIGS, LENGTHS, PAD

WIDTH = 24
TOKENIZER = load_tokenizer("embedded")
"""A token is a byte."""


def read(ids: Sequence[int] | torch.Tensor) -> str:
    return str(TOKENIZER.decode(list(map(int, ids))))


def generator(config: Native | None = None, *, ends: tuple[int, ...] = ()) -> NativeGenerator:
    module = decoder("llama")
    use_interface(module)
    return NativeGenerator(
        decoder_of(module),
        device="cpu",
        ends=Ends(pad_token_id=PAD, eos_token_ids=ends, tokenizer=TOKENIZER),
        config=config,
    )


def first_end(ids: list[int], texts: tuple[str, ...]) -> int:
    """Tokens up to the one that completes a text; all where none does."""
    ends = (n for n in range(len(ids)) if any(text in read(ids[: n + 1]) for text in texts))
    return next(ends, len(ids) - 1) + 1


def said(answers: TensorDict) -> list[list[int]]:
    pairs = zip(answers["response_ids"], answers["response_mask"], strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]


@pytest.fixture(scope="module")
def whole() -> TensorDict:
    return generator().generate(table(token_lists(LENGTHS)), sampling=Sampling(max_new_tokens=WIDTH), seed=5)


@pytest.fixture(scope="module")
def texts(whole: TensorDict) -> tuple[str, ...]:
    """Of some answers, in their middle and at their very end."""
    answers = said(whole)
    return read(answers[0][4:6]), read(answers[1][-3:])


@pytest.mark.parametrize("config", [Native(), *CONFIGS], ids=str)
def test_an_answer_ends_with_the_token_that_completes_a_text(
    whole: TensorDict, texts: tuple[str, ...], config: Native
) -> None:
    sampling = Sampling(max_new_tokens=WIDTH, stop_strings=texts)
    out = generator(config).generate(table(token_lists(LENGTHS)), sampling=sampling, seed=5)
    expected = [ids[: first_end(ids, texts)] for ids in said(whole)]
    assert said(out) == expected
    assert {len(ids) for ids in expected} & {*range(1, WIDTH)}
    for row, ids in enumerate(expected):
        torch.testing.assert_close(
            out["log_probs"][row, : len(ids)], whole["log_probs"][row, : len(ids)], atol=1e-5, rtol=0
        )
        assert not out["log_probs"][row, len(ids) :].any()


def test_an_end_token_ends_it_where_a_text_might(whole: TensorDict) -> None:
    end, rows = int(whole["response_ids"][2, 3]), table(token_lists(LENGTHS))
    sampling = Sampling(max_new_tokens=WIDTH, stop_strings=("\0\0\0" + read([end]),))
    out = generator(ends=(end,)).generate(rows, sampling=sampling, seed=5)
    right = generator(ends=(end,)).generate(rows, sampling=Sampling(max_new_tokens=WIDTH), seed=5)
    assert said(out) == said(right)
    assert len(said(out)[2]) <= 4


def test_an_answer_that_ends_with_a_text_is_not_cut_off(whole: TensorDict, texts: tuple[str, ...]) -> None:
    ends = Ends(pad_token_id=PAD, eos_token_ids=(7,), tokenizer=TOKENIZER)
    ids, mask, sampling = whole["response_ids"], whole["response_mask"], Sampling(max_new_tokens=WIDTH)
    cut = ends.cut_off(ids, mask, sampling=sampling)
    assert torch.equal(cut, mask[:, -1] & (ids[:, -1] != 7))
    by_text = Sampling(max_new_tokens=WIDTH, stop_strings=texts)
    less = ends.cut_off(ids, mask, sampling=by_text)
    ended = [read(answer).endswith(texts) for answer in said(whole)]
    assert torch.equal(less, cut & ~torch.tensor(ended))
    assert int(cut.sum()) > int(less.sum())


def test_a_text_that_a_pause_divides_ends_the_answer(whole: TensorDict, texts: tuple[str, ...]) -> None:
    sampling, native = Sampling(max_new_tokens=WIDTH, stop_strings=texts), generator()
    rows = table(token_lists(LENGTHS))
    for steps in (1, *range(4, 7), *range(WIDTH - 3, WIDTH)):  # before, within and behind both texts
        left = [steps]

        def tired(ended: torch.Tensor, left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        part = native.resume(rows, sampling=sampling, seed=5, pause=tired)
        begun = TensorDict({**rows, **part}, batch_size=rows.batch_size)
        rest = native.resume(begun, sampling=sampling, seed=5, pause=lambda _: False)
        assert said(rest) == [ids[: first_end(ids, texts)] for ids in said(whole)]
