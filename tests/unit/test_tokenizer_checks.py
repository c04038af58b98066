"""Models with another tokenizer than the actor's: which are refused, and why, before anything is placed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_lightning.algos import GRPO, PPO, SFT
from rlhf_lightning.data import CompletionData, MixedData, PromptData, TaskData, TextData, load_tokenizer
from rlhf_lightning.functional import SFTLoss
from rlhf_lightning.spec import EMBEDDED_DIRECTORY
from rlhf_lightning.workers import Actor, Critic, Reference, Reward, Scorer
from tests.embedded_model import build_byte_tokenizer
from tests.unit.algos.short import refusal
from tests.unit.algos.small import judging, write_model, write_other, write_rows


@pytest.mark.parametrize("role", ["critic", "reward", "reference"])
def test_another_tokenizer_is_refused(role: str, tmp_path: Path) -> None:
    path = write_other(tmp_path / "other", 2)
    if role == "reward":
        judging(path)
    steps = Reward(path=path, per_token="steps")  # noqa: S106
    other = {"critic": Critic(path=path), "reward": steps, "reference": Reference(path=path)}
    told = refusal(PPO(**{role: other[role]}), tmp_path)  # type: ignore[arg-type]
    assert told.startswith(
        f"{role}.path={path!r}: reads the token ids of 'embedded', and its tokenizer knows"
    )
    assert ("per_token outcome" in told) == (role == "reward")


class Judging(SFT):
    """Has a second model that learns, the embedded one unless it is told another."""

    judge: Scorer = field(default_factory=Scorer)


def test_a_second_model_may_begin_as_the_first(tmp_path: Path) -> None:
    """Unlike a critic it does not by default."""
    actor, data = Actor(path=write_other(tmp_path / "other", 2)), TaskData(completions=True)
    told = refusal(Judging(actor=actor), tmp_path, data=data)
    assert told.startswith(f"judge.path='embedded': reads the token ids of {actor.path!r}")
    assert told.endswith(f", or type --algo.judge.path '' to begin with the weights of {actor.path!r}.")
    assert refusal(Judging(actor=actor, judge=Scorer(path="")), tmp_path, data=data) == "started"


@dataclass(frozen=True, kw_only=True)
class Foreign(Actor):
    """Is given prompts in tokens of its own."""

    own_tokens: ClassVar[bool] = True


class Debating(GRPO):
    """Has a second model that answers."""

    other: Actor = field(default_factory=Foreign)


def test_a_second_actor_has_its_own_tokenizer_where_its_class_says_so(tmp_path: Path) -> None:
    """And no prompt of the data is too long for it, since it reads none."""
    path, short = (write_other(tmp_path / name, 2) for name in ("other", "short"))
    config = AutoConfig.from_pretrained(short)
    config.max_position_embeddings = 2
    config.save_pretrained(short)
    assert refusal(Debating(other=Foreign(path=short)), tmp_path) == "started"
    told = refusal(Debating(other=Actor(path=path)), tmp_path)
    assert "same tokenizer, own_tokens = True in its class where step makes its prompts of texts, or" in told


def test_a_judge_that_is_not_told_is_advised_to_be(tmp_path: Path) -> None:
    path = judging(write_other(tmp_path / "other", 2))
    for reward in (Reward(path=path, tokenizer=path), Reward(functions="length", tokenizer=path)):
        told = refusal(PPO(reward=reward), tmp_path)
        assert "or leave reward.tokenizer out" in told
        assert "per_token" not in told


@pytest.mark.parametrize("role", ["critic", "reward", "reference"])
def test_a_model_without_the_actors_last_tokens_does_not_read_its_ids(role: str, tmp_path: Path) -> None:
    """It knows 262 of 264 tokens, and would look for the others behind its last."""
    path = str(tmp_path / "fewer")
    tokenizer = build_byte_tokenizer()
    kept = json.loads(tokenizer.backend_tokenizer.to_str())
    last = ("<extra_0>", "<extra_1>")
    kept["model"]["vocab"] = {token: n for token, n in kept["model"]["vocab"].items() if token not in last}
    kept["added_tokens"] = [token for token in kept["added_tokens"] if token["content"] not in last]
    names = {"eos_token": "<eos>", "pad_token": "<pad>"}
    fewer = Tokenizer.from_str(json.dumps(kept))
    PreTrainedTokenizerFast(tokenizer_object=fewer, **names).save_pretrained(path)
    config = AutoConfig.from_pretrained(EMBEDDED_DIRECTORY, vocab_size=263, num_labels=1)
    if role == "reference":
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    else:
        AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    role_of = {"critic": Critic, "reward": Reward, "reference": Reference}[role]
    told = refusal(PPO(**{role: role_of(path=path)}), tmp_path)
    if role == "reward":
        assert told == "started"
        retelling = Reward(path=path, tokenizer="embedded", reads_to="end").retelling
        assert retelling is not None
        assert retelling.reads_to == "end"
    else:
        assert "knows 262 of 264 by the same number; they go up to 263, and the model has 263 tokens" in told


@pytest.mark.parametrize("role", ["critic", "reward", "reference"])
def test_a_token_that_the_actor_has_none_for_is_not_said(role: str, tmp_path: Path) -> None:
    """As in Gemma 3, whose tokenizers have one for images behind the last of the smallest models."""
    paths = [str(tmp_path / name) for name in ("actor", "other")]
    for path in paths:
        tokenizer = build_byte_tokenizer()
        tokenizer.add_tokens(["<image>"], special_tokens=True)
        tokenizer.save_pretrained(path)
        config = AutoConfig.from_pretrained(EMBEDDED_DIRECTORY, num_labels=1)
        if role == "reference" or path == paths[0]:
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
        else:
            AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    actor, kinds = Actor(path=paths[0]), {"critic": Critic, "reward": Reward, "reference": Reference}
    other = kinds[role](path=paths[1])
    assert refusal(PPO(actor=actor, **{role: other}), tmp_path) == "started"
    if isinstance(other, Reward):
        assert other.following(actor).retelling is None


def test_data_is_encoded_for_the_model_that_reads_it(tmp_path: Path) -> None:
    """Also the second model's that reads the same data module."""
    data = PromptData.from_rows(
        [{"prompt": "abc", "answer": "x"}] * 4, held_out=[{"prompt": "de", "answer": "x"}], batch_size=2
    )
    paths = [str(EMBEDDED_DIRECTORY), write_other(tmp_path / "other", 2)]
    for path in (*paths, paths[0]):
        assert refusal(PPO(actor=Actor(path=path)), tmp_path, data=data) == "started"
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode("abc"), tokenizer.encode("de")
        assert data.columns
        assert next(iter(data.train_dataloader()))["prompt_ids"].tolist() == [ids[0]] * 2
        assert next(iter(data.val_dataloader()[0]))["prompt_ids"].tolist() == [ids[1]]


def test_rows_are_encoded_once_for_a_model_by_whatever_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    data = PromptData.from_rows([{"prompt": "abc", "answer": "x"}] * 4, batch_size=2)
    algorithm = PPO(actor=Actor(path="model"))
    assert refusal(algorithm, tmp_path, data=data) == "started"
    rows = data.train_rows
    assert refusal(algorithm, tmp_path, data=data) == "started"
    assert data.train_rows is rows


@pytest.mark.parametrize("mixed", [True, False])
def test_data_that_the_actor_would_read_as_other_texts_is_refused(mixed: bool, tmp_path: Path) -> None:
    path = write_other(tmp_path / "other", 2)
    file = write_rows(tmp_path / "texts.jsonl", [{"text": "abc"}] * 4)
    other = TextData(path=file, batch_size=1, tokenizer=path)
    prompts = PromptData.from_rows([{"prompt": "abc", "answer": "x"}] * 4, batch_size=2, tokenizer="embedded")
    data = MixedData(main=prompts, ptx=other) if mixed else other
    algorithm = PPO(ptx_loss=SFTLoss(coef=0.1)) if mixed else SFT()
    told = refusal(algorithm, tmp_path, data=data)
    option = "data.ptx.tokenizer" if mixed else "data.tokenizer"
    assert told.startswith(f"{option}={path!r}: 'embedded' would read these token ids")
    assert "knows 2 of 264 by the same number" in told
    assert f"Leave {option} out" in told


def test_where_a_judge_reads_to_is_tried_out(tmp_path: Path) -> None:
    path = judging(write_other(tmp_path / "other", 2))
    tokenizer = load_tokenizer(path)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(path)
    load_tokenizer.cache_clear()
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": [{"role": "user", "content": "a"}]}] * 2)
    chats = PromptData(path=file, chat_template=True, batch_size=2)
    assert refusal(PPO(reward=Reward(path=path)), tmp_path, data=chats) == "started"
    told = refusal(PPO(reward=Reward(path=path, reads_to="end")), tmp_path, data=chats)
    assert told.startswith(f"reward.path={path!r}: the tokenizer {path!r} has no end token")
    assert told.endswith('in its tokenizer_config.json, such as "eos_token": "<|endoftext|>".')


def test_a_judge_of_whole_responses_may_have_another_tokenizer(tmp_path: Path) -> None:
    path = write_other(tmp_path / "other", 2)
    config = AutoConfig.from_pretrained(path)
    config.max_position_embeddings = 2  # too few for any row: it reads the ends
    config.save_pretrained(path)
    judging(path)
    assert refusal(PPO(reward=Reward(path=path)), tmp_path) == "started"


REFUSED = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "why"), [(REFUSED, "of system, assistant (no system)"), (None, "of user")]
)
def test_messages_that_a_judge_cannot_read(template: str | None, why: str, tmp_path: Path) -> None:
    path = judging(write_other(tmp_path / "other", 2))
    rows: list[dict[str, object]] = [
        {"prompt": [{"role": role, "content": "a"}]} for role in ("user", "system", "user")
    ]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    chats = PromptData(path=file, chat_template=True, batch_size=2)
    assert refusal(PPO(reward=Reward(path=path)), tmp_path, data=chats) == "started"
    path = judging(write_other(tmp_path / "strict", 2))
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    load_tokenizer.cache_clear()
    told = refusal(PPO(reward=Reward(path=path)), tmp_path, data=chats)
    assert told.startswith(f"reward.path={path!r}: the tokenizer of {path} cannot render messages {why}")
    texts = PromptData(path=write_rows(tmp_path / "texts.jsonl", [{"prompt": "a"}]), batch_size=1)
    assert refusal(PPO(reward=Reward(path=path)), tmp_path, data=texts) == "started"


def test_rows_with_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    """Engines that divide the vocabulary would take such a token for none, and go on."""
    path = write_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(path)
    config.vocab_size = load_tokenizer(path).get_vocab()["<extra_0>"]  # the tokens before it
    config.save_pretrained(path)

    def told(answer: str) -> str:
        rows: list[dict[str, object]] = [{"prompt": "1", "response": said} for said in ("2", answer)]
        data = CompletionData(path=write_rows(tmp_path / "rows.jsonl", rows), batch_size=2)
        return refusal(SFT(actor=Actor(path=path)), tmp_path, data=data, limit=0)

    assert told("3") == "started"
    assert told("2<extra_0>") == (
        f"data: the tokenizer makes the token {config.vocab_size} of the row with the prompt '1', and the "
        f"model has the tokens 0 to {config.vocab_size - 1}. Give the model embeddings for all of its "
        "tokenizer's tokens (transformers: model.resize_token_embeddings(len(tokenizer))), or put its own "
        "tokenizer beside it."
    )
