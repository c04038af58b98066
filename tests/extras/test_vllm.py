"""The same contract over both generation engines; and what is vLLM's own: its caches and its memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tensordict import TensorDict
from transformers import Qwen2Config

from rlhf_lightning.engines import VLLM, FSDPEngine, GenerationEngine, Native, generation_engine
from rlhf_lightning.engines.vllm.engine import VLLMEngine
from rlhf_lightning.spec import ModelSpec, Sampling
from tests.extras import generating
from tests.extras.generating import EXACT, PAD, POSITIONS, SMALL, STOPS, TOKENIZER, VOCABULARY, prompts
from tests.unit.engines.decoders import agree, table
from tests.unit.engines.tiny import SEAT

LENGTHS = [3, 9, 1, 12, 9, 5, 2]
BLOCK = 128
"""Tokens in a block of vLLM's prefix cache on a CPU: a shorter prompt is never found in it."""


SPOTS = [(0, slice(4, 6)), (3, slice(13, 16))]
"""Of answers to be ended by a text: the one in the middle of a row, the other at another's very end."""


def read_to(texts: Sequence[str], tokens: Sequence[int]) -> int:
    """Tokens up to the one that completes a text; all where none does."""
    reads = (str(TOKENIZER.decode([*tokens[: n + 1]])) for n in range(len(tokens)))
    ends = (n for n, read in enumerate(reads) if any(text in read for text in texts))
    return next(ends, len(tokens) - 1) + 1


class Pair:
    """A model in training, and an engine that generates with it."""

    def __init__(self, spec: ModelSpec, kind: Literal["native", "vllm"], *, vllm: VLLM = SMALL) -> None:
        self.source = FSDPEngine(spec)
        config = Native() if kind == "native" else vllm
        self.engine: GenerationEngine = generation_engine(
            spec, self.source, seat=SEAT, ends=generating.ends(), config=config
        )

    def __call__(self, rows: TensorDict, sampling: Sampling, *, seed: int = 5) -> TensorDict:
        return self.engine.generate(rows, sampling=sampling, seed=seed)


@pytest.fixture(scope="module", params=["native", "vllm"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    found = Pair(generating.write(tmp_path_factory.mktemp("model")), request.param)
    yield found
    if request.param == "vllm":
        found.engine.close()  # type: ignore[attr-defined]


def test_greedy_is_what_transformers_generates(pair: Pair, tmp_path: Path) -> None:
    model, sequences = generating.exported(pair.source, tmp_path), prompts(LENGTHS)
    out = pair(table(sequences), Sampling(max_new_tokens=15, temperature=0))
    for row, prompt in enumerate(sequences):
        mask = torch.ones(1, len(prompt))
        said = model.generate(  # type: ignore[operator]
            prompt[None], attention_mask=mask, max_new_tokens=15, do_sample=False, pad_token_id=PAD
        )
        assert torch.equal(out["response_ids"][row], said[0, len(prompt) :])
    expected = generating.judged(model, sequences, out, Sampling(temperature=0))
    torch.testing.assert_close(out["log_probs"], expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=11, stop_token_ids=STOPS),
        Sampling(max_new_tokens=11, temperature=0.6, top_k=9),
        Sampling(max_new_tokens=11, temperature=1.7, top_p=0.5),
    ],
)
def test_log_probs_are_those_before_truncation(pair: Pair, tmp_path: Path, sampling: Sampling) -> None:
    sequences = prompts(LENGTHS)
    out = pair(table(sequences), sampling)
    expected = generating.judged(generating.exported(pair.source, tmp_path), sequences, out, sampling)
    torch.testing.assert_close(out["log_probs"], expected, atol=EXACT, rtol=0)


def test_the_trained_model_answers_whatever_else_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LongRoPE, whose original length vLLM looks for elsewhere, another architecture, and other ends."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    long: Any = {**rope, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    monkeypatch.setitem(generating.MODELS, "long", Qwen2Config(**generating._SIZES, rope_parameters=long))
    spec = generating.write(tmp_path / "files", "long")
    sequences, sampling = prompts([3, 22]), Sampling(max_new_tokens=9)
    file = tmp_path / "files" / "config.json"
    file.write_text(file.read_text().replace("Qwen2ForCausalLM", "LlamaForCausalLM"))
    (tmp_path / "files" / "generation_config.json").write_text(f'{{"eos_token_id": {[*range(VOCABULARY)]}}}')
    pair = Pair(spec, "vllm")
    out = pair(table(sequences), sampling)
    assert out["response_mask"].all()
    expected = generating.judged(generating.exported(pair.source, tmp_path), sequences, out, sampling)
    torch.testing.assert_close(out["log_probs"], expected, atol=EXACT, rtol=0)
    with pytest.raises(ValueError, match=r"prompt of 24 tokens .* exceed the 32 positions"):
        pair(table(prompts([24])), sampling)
    pair.engine.close()  # type: ignore[attr-defined]


def test_truncation_leaves_the_likeliest(pair: Pair) -> None:
    rows = table(prompts([4]) * 60)
    free = pair(rows, Sampling(max_new_tokens=1))["response_ids"]
    few = pair(rows, Sampling(max_new_tokens=1, top_k=3))["response_ids"]
    assert len(few.unique()) <= 3 < len(free.unique())
    likeliest = pair(rows, Sampling(max_new_tokens=1, temperature=0))["response_ids"]
    assert torch.equal(pair(rows, Sampling(max_new_tokens=1, min_p=1))["response_ids"], likeliest)


def test_order_and_company_change_nothing(pair: Pair) -> None:
    rows, sampling = table(prompts(LENGTHS)), Sampling(max_new_tokens=9, top_p=0.9)
    out = pair(rows, sampling)
    order = torch.tensor([4, 2, 6, 0, 5, 1, 3])
    agree(pair(rows[order], sampling), out[order])
    for row in range(len(rows)):
        agree(pair(rows[row : row + 1], sampling), out[row : row + 1])


def test_seed_and_row_id_decide(pair: Pair) -> None:
    same, sampling = prompts([6]) * 4, Sampling(max_new_tokens=8)
    out = pair(table(same), sampling)["response_ids"]
    assert len({tuple(row) for row in out.tolist()}) == 4
    assert torch.equal(pair(table(same, first_id=101), sampling)["response_ids"][:3], out[1:])
    assert not torch.equal(pair(table(same), sampling, seed=6)["response_ids"], out)


def test_a_stop_token_ends_its_row(pair: Pair) -> None:
    rows = table(prompts(LENGTHS))
    free = pair(rows, Sampling(max_new_tokens=16))["response_ids"]
    stops = (int(free[0, 4]), int(free[3, 0]))
    out = pair(rows, Sampling(max_new_tokens=16, stop_token_ids=stops))
    for row, tokens in enumerate(free.tolist()):
        found = [column + 1 for column, token in enumerate(tokens) if token in stops]
        length = min(found, default=16)
        assert out["response_mask"][row].tolist() == [True] * length + [False] * (16 - length)
        assert out["response_ids"][row].tolist() == tokens[:length] + [PAD] * (16 - length)
        assert not out["log_probs"][row, length:].any()


def test_the_token_that_completes_a_text_ends_its_row(pair: Pair) -> None:
    rows = table(prompts(LENGTHS * 3))  # more than vLLM has at once: some have no token yet
    free = pair(rows, Sampling(max_new_tokens=16))
    texts = tuple(str(TOKENIZER.decode(free["response_ids"][row, at])) for row, at in SPOTS)
    out = pair(rows, Sampling(max_new_tokens=16, stop_strings=texts))
    lengths = [read_to(texts, tokens) for tokens in free["response_ids"].tolist()]
    assert lengths[0] == 6
    assert lengths[3] == lengths[5] == 16
    assert out["response_mask"].sum(1).tolist() == lengths
    for row, length in enumerate(lengths):
        assert out["response_ids"][row].tolist() == [
            *free["response_ids"][row, :length].tolist(),
            *[PAD] * (16 - length),
        ]
        torch.testing.assert_close(
            out["log_probs"][row, :length], free["log_probs"][row, :length], atol=EXACT, rtol=0
        )


def test_a_text_that_begins_in_the_prompt_does_not_end_its_row(pair: Pair) -> None:
    sequences = prompts(LENGTHS)
    free = pair(table(sequences), Sampling(max_new_tokens=6))["response_ids"].tolist()
    text = str(TOKENIZER.decode([int(sequences[0][-1]), free[0][0]]))
    out = pair(table(sequences), Sampling(max_new_tokens=6, stop_strings=(text,)))
    lengths = [read_to([text], tokens) for tokens in free]
    assert out["response_mask"].sum(1).tolist() == lengths
    assert lengths[0] > 1


def test_no_rows_give_empty_columns(pair: Pair) -> None:
    out = pair(table([]), Sampling(max_new_tokens=4))
    assert {name: (x.shape, x.dtype) for name, x in out.items()} == {
        "response_ids": ((0, 4), torch.int64),
        "response_mask": ((0, 4), torch.bool),
        "log_probs": ((0, 4), torch.float32),
    }


def test_tokens_follow_the_distribution(pair: Pair, tmp_path: Path) -> None:
    (prompt,), count = prompts([5]), 2000
    out = pair(table([prompt] * count), Sampling(max_new_tokens=1, temperature=1.5))
    with torch.no_grad():
        logits = generating.exported(pair.source, tmp_path)(prompt[None]).logits[0, -1]
    expected = (logits / 1.5).softmax(-1) * count
    seen = torch.bincount(out["response_ids"][:, 0], minlength=VOCABULARY)
    common = expected > 5
    assert int(common.sum()) > 5
    statistic = ((seen - expected)[common] ** 2 / expected[common]).sum() / common.sum()
    assert float(statistic) < 2.5


def test_rows_are_handed_over_as_they_end(pair: Pair) -> None:
    rows, sampling = table(prompts(LENGTHS)), Sampling(max_new_tokens=13, stop_token_ids=STOPS)
    whole = pair(rows, sampling)
    found = list(pair.engine.finished(rows, sampling=sampling, seed=5, parts=3))
    order, lengths = torch.cat([which for which, _ in found]), whole["response_mask"].sum(1)
    assert sorted(order.tolist()) == list(range(len(rows)))
    for which, answers in found:
        agree(answers, whole[which])
    for (before, _), (after, _) in pairwise(found):
        assert lengths[before].max() <= lengths[after].min()
    assert lengths[found[0][0]].max() < lengths[found[-1][0]].min()


def test_rows_that_end_later_do_not_overtake_those_that_wait(pair: Pair) -> None:
    """Where more end at once than a part lacks."""
    rows = table(prompts(LENGTHS * 2))
    said = pair(rows, Sampling(max_new_tokens=4))["response_ids"]
    sampling = Sampling(max_new_tokens=4, stop_token_ids=(int(said[2, 1]),))
    lengths = pair(rows, sampling)["response_mask"].sum(1)
    longest_first = rows[lengths.argsort(descending=True)]
    (first, _), _ = pair.engine.finished(longest_first, sampling=sampling, seed=5, parts=2)
    early = int((lengths < 4).sum())
    assert 0 < early < len(first)
    assert {*range(len(rows) - early, len(rows))} < {*first.tolist()}


def test_a_generation_may_be_left_early(pair: Pair) -> None:
    rows, sampling = table(prompts(LENGTHS)), Sampling(max_new_tokens=13, stop_token_ids=STOPS)
    whole, going = pair(rows, sampling), pair.engine.finished(rows, sampling=sampling, seed=5, parts=3)
    next(going)
    del going
    agree(pair(rows, sampling), whole)
    gc.collect()
    kept = [held for held in gc.get_objects() if type(held).__name__ == "RunningRequests"]
    assert not kept, "they hold all rows"


def test_long_and_empty_prompts_are_refused(pair: Pair) -> None:
    sampling = Sampling(max_new_tokens=20)
    with pytest.raises(ValueError, match=r"row 101: its prompt of 493 tokens .* more than 492 tokens"):
        pair(table(prompts([44, POSITIONS - 19])), sampling)
    pair(table(prompts([POSITIONS - 20])), sampling)
    with pytest.raises(ValueError, match=r"row 101: its prompt is empty"):
        pair(table(prompts([4, 0])), sampling)
    with pytest.raises(ValueError, match=r"max_new_tokens=512: .*Try 256"):
        pair(table(prompts([4])), Sampling(max_new_tokens=POSITIONS))


def test_answers_follow_the_weights(pair: Pair, tmp_path: Path) -> None:
    sequences, sampling = prompts([3, 2 * BLOCK + 9, 40]), Sampling(max_new_tokens=12)
    before = pair(table(sequences), sampling)
    version = pair.source.version
    assert not isinstance(pair.engine, VLLMEngine) or pair.engine.version == version
    generating.learn(pair.source, prompts([5, 3]))
    out = pair(table(sequences), sampling)
    assert pair.source.version == version + 1
    assert not isinstance(pair.engine, VLLMEngine) or pair.engine.version == pair.source.version
    assert not torch.equal(out["response_ids"], before["response_ids"])
    expected = generating.judged(generating.exported(pair.source, tmp_path), sequences, out, sampling)
    torch.testing.assert_close(out["log_probs"], expected, atol=EXACT, rtol=0)
