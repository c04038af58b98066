"""What a model's configuration tells of its sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from rlhf_lightning.algos import GRPO
from rlhf_lightning.engines import explaining_positions, max_positions, num_tokens
from rlhf_lightning.spec import ModelSpec, Sampling
from rlhf_lightning.workers import Actor
from tests.unit.algos.short import refusal
from tests.unit.algos.small import write_model
from tests.unit.engines.decoders import ORIGINAL, VOCAB, decoder, reference, token_lists

LONG = {"type": "su", "short_factor": [1.0], "long_factor": [4.0]}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 64}, 64),
        ({"max_position_embeddings": 32, "text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 64),
        ({"max_position_embeddings": 64, "original_max_position_embeddings": 16}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": LONG}, 64),
        ({"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling": LONG}, 16),
        ({"rope_parameters": {"full": {**LONG, "original_max_position_embeddings": 16}, "sliding": {}}}, 16),
    ],
    ids=str,
)
def test_positions_are_those_of_the_configuration(
    config: dict[str, object], positions: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert max_positions(ModelSpec(path=str(tmp_path))) == positions


def test_a_directory_tells_what_its_module_does(tmp_path: Path) -> None:
    for kind, positions in (("llama", 64), ("gpt2", 64), ("phi3", ORIGINAL)):
        config = decoder(kind).config
        config.save_pretrained(tmp_path / kind)
        spec = ModelSpec(path=str(tmp_path / kind))
        assert max_positions(spec) == max_positions(config) == positions
        assert num_tokens(spec) == VOCAB
    assert max_positions(GPT2Config(n_positions=8)) == 8


def test_beyond_these_positions_a_row_would_change_the_others() -> None:
    module, (short,) = decoder("phi3"), token_lists([ORIGINAL])
    one_more = torch.arange(ORIGINAL) + torch.tensor([[0], [1]])
    with torch.no_grad():
        both = module(input_ids=short.expand(2, -1), position_ids=one_more, use_cache=False).logits
    assert float((both[0] - reference(module, short)).abs().max()) > 0.1


def test_an_error_is_explained_where_there_is_something_to_explain() -> None:
    long, short = decoder("phi3").config, decoder("llama").config
    told = "Too long. It is a model with LongRoPE, of which original_max_position_embeddings=16 are used: one"
    with pytest.raises(ValueError, match=f"^{told}"), explaining_positions(long):
        raise ValueError("Too long.")
    with pytest.raises(ValueError, match=r"^Too long\.$"), explaining_positions(short):
        raise ValueError("Too long.")


def test_rows_that_are_too_long_for_it_are_refused_before_anything_is_placed(tmp_path: Path) -> None:
    path = write_model(tmp_path / "long")
    file = tmp_path / "long" / "config.json"
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    long = {"rope_parameters": {**rope, "rope_theta": 1e4}, "original_max_position_embeddings": 256}
    file.write_text(json.dumps(json.loads(file.read_text()) | long))
    told = refusal(GRPO(actor=Actor(path=path, sampling=Sampling(max_new_tokens=256))), tmp_path)
    assert told.startswith("sampling.max_new_tokens=256: with the longest prompt, ")
    assert "and the model has 256 positions" in told
    assert "a model with LongRoPE, of which original_max_position_embeddings=256 are used" in told
    assert refusal(GRPO(actor=Actor(path=path, sampling=Sampling(max_new_tokens=99))), tmp_path) == "started"
