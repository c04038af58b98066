"""Exports are read by programs on transformers 4, which know other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
)

from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.engines.huggingface.older_names import add_older_names
from rlhf_lightning.spec import ModelSpec
from tests.unit.engines import tiny

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "rope_type": "yarn"}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
}
BASE = 500_000.0
LONGROPE = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
"""The scaling in a file of Phi-3 or Phi-4-mini; version 4 takes no other names in it."""
NEWER = ("rope_parameters", "dtype")


def phi3(scaling: dict[str, Any]) -> Phi3Config:
    """As version 5 reads a file of version 4."""
    return Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        original_max_position_embeddings=16,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": BASE, "partial_rotary_factor": 0.5, **scaling},
    )


def said(config: PreTrainedConfig) -> dict[str, object]:
    """All that it says of the model."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def read(directory: Path, *, without: tuple[str, ...] = ()) -> dict[str, object]:
    """What transformers reads of a directory whose file lacks some names."""
    file = directory / "config.json"
    held = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in held.items() if name not in without}))
    return said(AutoConfig.from_pretrained(directory))


@pytest.mark.parametrize("kind", SCALINGS)
def test_an_export_has_the_older_names_too(kind: str, tmp_path: Path) -> None:
    """Version 5 reads these as well, so that it can tell whether they say the same."""
    scaling = SCALINGS[kind]
    config = tiny.config()
    config.rope_parameters = {"rope_theta": BASE, **(scaling or {"rope_type": "default"})}
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    FSDPEngine(ModelSpec(path=str(tmp_path / "model"), dtype="bfloat16")).export(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    older = written["rope_theta"], written["rope_scaling"], written["torch_dtype"]
    assert older == (BASE, scaling, "bfloat16")
    expected = read(tmp_path / "model") | {"dtype": "bfloat16"}
    assert expected["rope_parameters"] == config.rope_parameters
    assert read(tmp_path / "out") == expected
    assert read(tmp_path / "out", without=NEWER) == expected


@pytest.mark.parametrize(
    ("config", "older"),
    [
        (
            GPTNeoXConfig(rope_parameters={"rope_theta": BASE, "partial_rotary_factor": 1.0}),
            {"rotary_emb_base": BASE, "rotary_pct": 1.0, "rope_scaling": None},
        ),
        (
            PhiConfig(rope_parameters={"rope_theta": BASE, "partial_rotary_factor": 0.25}),
            {"rope_theta": BASE, "partial_rotary_factor": 0.25, "rope_scaling": None},
        ),
        (phi3(LONGROPE), {"rope_theta": BASE, "partial_rotary_factor": 0.5, "rope_scaling": LONGROPE}),
        (GPT2Config(), {}),
        (Gemma3TextConfig(), {}),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_each_family_has_its_own_older_names(
    config: PreTrainedConfig, older: dict[str, object], tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    before = json.loads(file.read_text())
    add_older_names(file)
    assert json.loads(file.read_text()) == before | older
    assert read(tmp_path)["rope_parameters" if older else "model_type"] == before.get(
        "rope_parameters" if older else "model_type"
    )


def test_a_factor_that_version_4_could_not_say_is_kept_for_version_5(tmp_path: Path) -> None:
    config = phi3(LONGROPE | {"factor": 2.0})
    config.save_pretrained(tmp_path)
    add_older_names(tmp_path / "config.json")
    assert read(tmp_path)["rope_parameters"] == config.rope_parameters
    assert config.to_dict()["rope_parameters"]["factor"] == 2.0
