"""Responses of several turns: what an environment is told, where its words go, and what is learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from itertools import groupby
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO, PPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import turn_ids
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import OneStepOff, Pipelined
from rlhf_lightning.workers import Actor, Critic, Reward
from tests.unit.algos.short import refusal
from tests.unit.algos.small import run

FAST = OptimizerSpec(lr=1e-3)
R = 24
ENDS = tuple(range(60))
"""Of 264 tokens those that end a turn, so that turns of a model that knows nothing are short."""
REPLY = "<user>so: 42<assistant>"
ASKED: list[tuple[str, str, int]] = []
"""Of each reply: the prompt, what was said, and the row's number of letters."""


@pytest.fixture(autouse=True)
def _nothing_asked() -> Iterator[None]:
    ASKED.clear()
    yield
    ASKED.clear()


def insists(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str | None]:
    """Goes on for ever."""
    ASKED.extend(
        (p, said, len(str(row["prompt"]))) for p, said, row in zip(prompts, responses, rows, strict=True)
    )
    return [REPLY] * len(rows)


async def patient(
    prompts: list[str], responses: list[str], rows: list[dict[str, object]]
) -> list[str | None]:
    """Answers once, and those with an even number of letters only."""
    replies = insists(prompts, responses, rows)
    odd = [len(prompt) % 2 and REPLY not in said for prompt, said in zip(prompts, responses, strict=True)]
    return [reply if goes_on else None for reply, goes_on in zip(replies, odd, strict=True)]


def fails_later(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str | None]:
    """Works in the check before a run, whose three rows come first."""
    before = len(ASKED)
    insists(prompts, responses, rows)
    return [None] * (len(rows) if before == 0 else 1 // 0)


def silent(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str | None]:
    """Has nothing to say."""
    return [None] * len(insists(prompts, responses, rows))


def halves(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str | None]:
    """Cuts a character in two."""
    return ["\ud83d tool"] * len(insists(prompts, responses, rows))


def empty(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str | None]:
    """Has nothing to say, and goes on."""
    return [""] * len(insists(prompts, responses, rows))


def writes(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str | None]:
    """Keeps notes where others read."""
    for row in rows:
        row["seen"] = row["prompt"] = "by the environment"
    return silent(prompts, responses, rows)


def seen(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """What an environment has noted."""
    del prompts, responses
    return [float("seen" in row or "environment" in str(row["prompt"])) for row in rows]


def numbers(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """Is a reward function."""
    return [1.0] * len(insists(prompts, responses, rows))


def replies_seen(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """Counts the replies in a response, which reward functions read without special tokens."""
    del prompts, rows
    return [float(response.count("so: 42")) for response in responses]


class Kept(GRPO):
    """Keeps its batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batches: list[Batch] = []

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        self.batches.append(batch)
        return super().compute_advantage(batch)


def actor(path: str, speaks: object, *, turns: int = 3, tokens: int = R) -> Actor:
    return Actor(
        path=path,
        optimizer=FAST,
        sampling=Sampling(max_new_tokens=tokens, stop_token_ids=ENDS),
        environment=None if speaks is None else Environment(function=speaks, turns=turns),  # type: ignore[arg-type]
    )


def grpo(path: str, speaks: object, **options: int) -> Kept:
    reward = Reward(functions=replies_seen)
    return Kept(actor=actor(path, speaks, **options), reward=reward, group_size=4)


def data() -> TaskData:
    return TaskData(batch_size=4, num_rows=16, num_val_rows=0)


def turns_of(batch: Batch, algorithm: RLHFAlgorithm) -> list[list[tuple[bool, str]]]:
    """Of each response the turns, whether they are the actor's, and their texts."""
    found = []
    for ids, mask in zip(batch["response_ids"].tolist(), batch["response_mask"], strict=True):
        end = int(mask.nonzero()[-1]) + 1
        pairs = groupby(zip(mask[:end].tolist(), ids[:end], strict=True), key=lambda pair: pair[0])
        spans = [(own, [token for _, token in tokens]) for own, tokens in pairs]
        found.append([(bool(own), str(algorithm.tokenizer.decode(tokens))) for own, tokens in spans])
    return found


def test_what_the_environment_says_stands_between_the_turns(model: str) -> None:
    algorithm = grpo(model, insists, turns=3)
    run(algorithm, data(), steps=1)
    (batch,) = algorithm.batches
    ids, mask = batch["response_ids"], batch["response_mask"]
    ends = torch.isin(ids, torch.tensor(ENDS))
    found = set()
    for row, turns in enumerate(turns_of(batch, algorithm)):
        assert int(batch["row_turns"][row]) == len(turns) // 2 + 1
        assert turns[1::2] == [(False, REPLY)] * (len(turns) // 2)
        replies, last = len(turns) // 2, int(mask[row].nonzero()[-1])
        closed = bool(ends[row, last])
        assert int((ends[row] & mask[row]).sum()) == replies + closed, "each turn before a reply has ended"
        assert bool(batch["row_truncated"][row]) == (replies < 2 or not closed), "it would go on for ever"
        assert torch.equal(batch["truncated_mask"][row], mask[row] & batch["row_truncated"][row])
        found.add((replies, closed))
    assert found >= {(2, True), (1, True)}, "three turns, and no room for a third"
    ended_before = (ends & mask).cumsum(1) - (ends & mask).int()
    assert torch.equal(turn_ids(mask), ended_before * mask)


def test_what_the_environment_says_stands_behind_what_was_said(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tokens that stand behind others, which are not those of a text alone with every tokenizer."""
    monkeypatch.setattr("rlhf_lightning.workers.conversation.encode_behind", lambda *_: [97, 98])
    algorithm = grpo(model, patient)
    run(algorithm, data(), steps=1)
    said = {text for turns in turns_of(algorithm.batches[0], algorithm) for own, text in turns if not own}
    assert said == {"ab"}


def test_log_probs_are_of_the_tokens_in_their_place(model: str) -> None:
    algorithm = grpo(model, insists)
    algorithm.actor = replace(algorithm.actor, recompute_log_probs=True)
    kept = run(algorithm, data(), steps=2)
    assert max(len(turns) for batch in algorithm.batches for turns in turns_of(batch, algorithm)) > 1
    assert max(numbers["actor/mismatch_kl"] for numbers in kept.numbers) < 1e-9
    for batch in algorithm.batches:
        assert (batch["rollout_log_probs"][batch["response_mask"]] < 0).all()
        assert not batch["rollout_log_probs"][~batch["response_mask"]].any()


def test_an_environment_is_told_what_was_said_and_of_whom(model: str) -> None:
    algorithm = grpo(model, patient)
    kept = run(algorithm, data(), steps=1)
    (batch,) = algorithm.batches
    asked = ASKED[3:]  # after those of the check before the run
    assert all(len(prompt) == letters for prompt, _, letters in asked)
    assert {prompt for prompt, _, _ in asked} == {row["prompt"] for row in batch.objects("rows")}  # type: ignore[index]
    turns = turns_of(batch, algorithm)
    assert {said for _, said, _ in asked if REPLY not in said} <= {spans[0][1] for spans in turns}
    for spans, row in zip(turns, batch.objects("rows"), strict=True):
        assert isinstance(row, dict)
        assert len(str(row["prompt"])) % 2 or len(spans) == 1
    seen = batch["scores"].sum(1)
    assert seen.tolist() == [len(spans) // 2 for spans in turns], "a reward function reads all of it"
    assert kept.numbers[0]["reward/mean"] == pytest.approx(float(seen.mean()))
    assert kept.numbers[0]["response/turns"] == pytest.approx(1 + float(seen.mean()))
    assert seen.any()


def test_one_turn_is_as_without_an_environment(model: str) -> None:
    alone, spoken = grpo(model, None), grpo(model, silent)
    one, other = (run(algorithm, data(), steps=2) for algorithm in (alone, spoken))
    assert one.numbers[-1]["actor/loss"] == other.numbers[-1]["actor/loss"]
    for first, second in zip(alone.batches, spoken.batches, strict=True):
        for name in ("response_ids", "response_mask", "log_probs", "row_truncated"):
            assert torch.equal(first[name], second[name]), name


def test_a_turn_that_ends_with_a_text_is_as_one_that_ends_with_its_token(model: str) -> None:
    """A token is a byte here: what is said, and which responses have no room for an end."""
    tokens, texts = grpo(model, insists), grpo(model, insists)
    ends = {*ENDS} - {*b"01"}  # <extra_0> and <extra_1> read so
    by_token = Sampling(max_new_tokens=R, stop_token_ids=tuple(ends))
    by_text = Sampling(max_new_tokens=R, stop_strings=tuple(map(chr, ends)))
    for algorithm, sampling in ((tokens, by_token), (texts, by_text)):
        algorithm.actor = replace(algorithm.actor, sampling=sampling)
        run(algorithm, data(), steps=2)
    for one, other in zip(tokens.batches, texts.batches, strict=True):
        for name in ("response_ids", "response_mask", "log_probs", "row_truncated", "row_turns"):
            assert torch.equal(one[name], other[name]), name
        assert 0 < int(one["row_truncated"].sum()) < len(one)


def test_ppo_learns_from_turns(model: str) -> None:
    algorithm = PPO(
        actor=actor(model, insists), critic=Critic(optimizer=FAST), reward=Reward(functions={"length": 1.0})
    )
    kept = run(algorithm, data(), steps=2)
    assert kept.numbers[-1]["actor/ratio"] == pytest.approx(1, abs=1e-5)
    assert kept.numbers[-1]["critic/loss"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"function": insists, "turns": 1},
            r"environment.turns=1: no turn of the actor follows a reply. Give at least 2",
        ),
        ({"function": "http://127.0.0.1:1/reply"}, "it is a function, not a service"),
        ({"function": lambda *_: []}, r"environment.function: .* workers cannot import it"),
        ({"function": "__main__.mine"}, r"environment.function: '__main__.mine' is in the script itself"),
    ],
)
def test_what_can_be_no_environment(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Environment(**options)  # type: ignore[arg-type]


def elsewhere(data_source: list[str], solution_str: list[str], ground_truth: list[object]) -> list[None]:
    """Is called in another way by another system."""
    return [None] * len(ground_truth)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (halves, r"returned '\\ud83d tool', which is not a text: .*surrogates not allowed"),
        (empty, r"returned '', which is not a text: it is empty. Return a text, or None"),
        (numbers, r"returned 1.0, which is not a text. Return a text, or None"),
        ("rewards", "environment rewards: it is not a dotted path. For your own function give"),
        ("tests.ranks.algos.test_turns.nobody", "defines no 'nobody'"),
        (elsewhere, r"where 'data_source' is another system's.*\(prompts, responses, rows\) -> replies"),
    ],
)
def test_it_is_tried_out_before_anything_starts(model: str, function: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(grpo(model, function), data())


def test_what_an_environment_writes_nobody_reads(model: str) -> None:
    algorithm = Kept(actor=actor(model, writes), reward=Reward(functions=seen), group_size=4)
    assert run(algorithm, data()).numbers[0]["reward/mean"] == 0


def test_an_environment_that_fails_is_named(model: str) -> None:
    with pytest.raises(RuntimeError, match=r"environment .*fails_later: ZeroDivisionError over \d+ rows"):
        run(grpo(model, fails_later), data())


def test_a_reply_without_a_token_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tokenizers make of characters that they leave out: two turns would be one."""
    monkeypatch.setattr("rlhf_lightning.workers.conversation.encode_behind", lambda *_: [])
    with pytest.raises(RuntimeError, match=r"'<user>so: 42.*', which has no token for the actor. Return an"):
        run(grpo(model, insists), data())


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (OneStepOff(max_staleness=2), r"several turns of all together. Try --strategy.max_staleness 1\."),
        (Pipelined(), r"Pipelined hands answers on as they end, .*Try --strategy openrlhf\."),
    ],
)
def test_strategies_that_do_not_wait_refuse_turns(
    model: str, strategy: OneStepOff | Pipelined, words: str
) -> None:
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_steps=1, logger=False)
    with pytest.raises(ValueError, match=words):
        trainer.fit(grpo(model, insists), datamodule=data())


class Tooled(GRPO):
    """Hands an environment to one call."""

    tool: Environment = field(default_factory=lambda: Environment(function=f"{__name__}.forgotten"))


def test_an_environment_of_the_algorithm_is_tried_out_too(tmp_path: Path) -> None:
    assert refusal(Tooled(), tmp_path).startswith(f"environment {__name__}.forgotten: the module {__name__}")
