"""An exported model with one number per token gives it in transformers, in rows padded by its tokenizer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.spec import ModelSpec
from tests.embedded_model import build_byte_tokenizer
from tests.unit.algos.small import judging, write_model
from tests.unit.data.conftest import write_spacing

EOS = 258
ANSWERS = ("4<eos>", "four, and no more<eos>", "five<eos>")


def write(
    directory: Path, pad: str | None, unk: str | None = None, also: int | None = None, **said: object
) -> ModelSpec:
    """A reward model whose tokenizer has 8 special tokens, 256 to 263, and these for two purposes."""
    config = AutoConfig.from_pretrained(write_model(directory))
    for name, value in said.items():
        setattr(config, name, value)
    config.save_pretrained(directory)
    tokenizer = build_byte_tokenizer()
    tokenizer.pad_token, tokenizer.unk_token = pad, unk
    tokenizer.save_pretrained(directory)
    if also is not None:
        GenerationConfig(eos_token_id=[EOS, also]).save_pretrained(directory)
    return ModelSpec(path=judging(str(directory)))


def ours(engine: FSDPEngine, answers: tuple[str, ...]) -> list[float]:
    """The numbers at the end tokens."""
    tokenizer, found = build_byte_tokenizer(), []
    for answer in answers:
        ids = torch.tensor([tokenizer.encode(answer)])
        columns = {"prompt_ids": ids[:, :1], "response_ids": ids[:, 1:]}
        masks = {"prompt_mask": ids[:, :1] >= 0, "response_mask": ids[:, 1:] >= 0}
        rows = TensorDict(columns | masks, batch_size=[1])
        found.append(float(engine.infer(rows, temperature=1.0)["values"][0, -1]))
    return found


def theirs(directory: Path, answers: tuple[str, ...], side: str) -> list[float]:
    """Those that transformers gives for all of them in a batch."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side=side)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    rows: dict[str, Any] = tokenizer([*answers], padding=True, return_tensors="pt")
    rows.pop("token_type_ids", None)
    if side == "left":
        rows["position_ids"] = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
    scores: list[float] = model(**rows).logits[:, 0].tolist()
    return scores


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "the tokenizer's": ({"pad": "<pad>", "pad_token_id": None}, 256),
    "not the model's": ({"pad": "<pad>", "pad_token_id": EOS}, 256),
    "the model's": ({"pad": None}, 256),
    "the unknown token": ({"pad": "<eos>", "unk": "<extra_0>", "pad_token_id": None}, 262),
    "the last special one": ({"pad": "<eos>", "pad_token_id": EOS}, 263),
    "none at which it stops": ({"pad": "<eos>", "pad_token_id": None, "also": 263}, 262),
    "one that the model has": ({"pad": "<extra_1>", "pad_token_id": None, "vocab_size": 263}, 262),
    "none below zero": ({"pad": None, "pad_token_id": -1}, 263),
}


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_an_export_at_its_end_token(name: str, tmp_path: Path) -> None:
    options, pad = CASES[name]
    engine, out = FSDPEngine(write(tmp_path / "model", **options), head="reward"), tmp_path / "out"
    engine.export(out)
    assert json.loads((out / "config.json").read_text())["pad_token_id"] == pad
    assert AutoTokenizer.from_pretrained(out).pad_token_id == pad
    expected = ours(engine, ANSWERS)
    for side in ("left", "right"):
        assert theirs(out, ANSWERS, side) == pytest.approx(expected, abs=1e-5)
    assert len({round(number, 4) for number in expected}) == len(expected)


def test_a_language_model_keeps_its_padding_token(tmp_path: Path) -> None:
    spec = write(tmp_path / "model", "<eos>", pad_token_id=EOS)
    FSDPEngine(spec).export(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == EOS
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token_id == EOS


def test_a_critic_is_padded_too(tmp_path: Path) -> None:
    """It may be what a reward model begins as."""
    FSDPEngine(write(tmp_path / "model", "<eos>"), head="scalar").export(tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").pad_token_id == 256
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token == "<pad>"  # noqa: S105


def test_files_that_nobody_may_write_are_written_anew(tmp_path: Path) -> None:
    """Also the older one, of which transformers 4 reads the special tokens."""
    spec = write(tmp_path / "model", "<eos>", pad_token_id=EOS)
    older = tmp_path / "model" / "special_tokens_map.json"
    older.write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<eos>"}))
    for file in (tmp_path / "model").iterdir():
        file.chmod(0o444)
    FSDPEngine(spec, head="reward").export(tmp_path / "out")
    written = json.loads((tmp_path / "out" / older.name).read_text())
    assert written == {"eos_token": "<eos>", "pad_token": "<extra_1>"}
    assert older.read_text().count("<eos>") == 2, "the model's own are left"


def test_a_tokenizer_without_another_token_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path / "model")
    write_spacing(tmp_path / "model", "ab")
    FSDPEngine(ModelSpec(path=judging(path)), head="reward").export(tmp_path / "out")
    before, after = (AutoConfig.from_pretrained(tmp_path / name).pad_token_id for name in ("model", "out"))
    assert before == after == 256
    with caplog.at_level(logging.WARNING):
        FSDPEngine(ModelSpec(path=path), head="reward").export(tmp_path / "out")
    assert f"path={path}: its tokenizer has no token but '<eos>' to pad with." in caplog.text
