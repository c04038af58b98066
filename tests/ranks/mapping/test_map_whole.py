"""`rlhf map` for models that Megatron does not take: what it writes is what a run accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser

from rlhf_lightning.algos import PPO
from rlhf_lightning.commands import map as command
from rlhf_lightning.mapping import memory
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.strategies import Auto
from rlhf_lightning.strategy_checks import check_layouts

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 32000,
    "max_position_embeddings": 4096,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}  # fmt: skip


def model(directory: Path, **more: object) -> str:
    """A directory with the config.json of a model of 7 B parameters."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**LLAMA, **more}))
    return str(directory)


def accepted(file: Path) -> Auto:
    """The strategy of a configuration, after the checks of its layouts that `rlhf fit` makes."""
    config = yaml.safe_load(file.read_text())
    parser = ArgumentParser()
    parser.add_class_arguments(Auto, "strategy")
    parser.add_class_arguments(PPO, "algo")
    given = parser.parse_object({name: config[name]["init_args"] for name in ("strategy", "algo")})
    built = parser.instantiate_classes(given)
    strategy, roles = built["strategy"], built["algo"].roles()
    assert isinstance(strategy, Auto)
    strategy.settings.check_read(apart=False)
    check_layouts(strategy, roles, strategy.place(tuple(roles), strategy.devices))
    return strategy


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model_type": "qwen3"}, "actor has model_type='qwen3': Megatron takes llama and qwen2 only"),
        ({"model_type": "mistral"}, "actor has model_type='mistral'"),
        ({"mlp_bias": True}, "actor has mlp_bias=true"),
        ({"rope_parameters": YARN}, "actor has rope_type='yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "actor has rope_type='yarn'"),
    ],
)
def test_what_is_written_runs_and_says_why_nothing_is_divided(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: dict[str, object], says: str
) -> None:
    path, file = model(tmp_path / "model", **more), tmp_path / "run.yaml"
    command.run(("--algo", "ppo", "--devices", "16", "--model", path, "--yaml", str(file), "--top", "1"))
    assert says in capsys.readouterr().out
    assert f"# no tensor shards and stages, but replicas on FSDP: {says}" in file.read_text()
    settings = accepted(file).settings
    assert (settings.engine, settings.train.max_tokens_per_micro_batch) == ("fsdp", 8192), "as predicted"


def test_fsdp_on_one_device_holds_a_model_once_and_frees_its_gradients(tmp_path: Path) -> None:
    """2 N of weights, 4 N of masters and 8 N of moments between updates, and no second copy to generate.

    Two devices share out masters and moments, and hold no other weights between updates.
    """
    path = model(tmp_path / "model", model_type="qwen3", num_hidden_layers=8)
    asked = ("--algo", "dapo", "--devices", "1", "--model", path, "--reward", "none")
    algorithm, options = command._parse(asked)
    costs = command.search(algorithm, {"actor": path, "reward": ""}, options).costs
    layout, shape = ParallelLayout(), costs.shapes["actor"]
    assert costs.resident("actor", layout) == 14 * shape.num_parameters
    assert costs.resident("actor", ParallelLayout(d=2)) == (4 + 8) * shape.num_parameters / 2
    assert memory.generation(shape, layout, costs.workload).parameters == 0


def test_one_such_model_decides_for_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A run has one training engine."""
    actor, reward = (model(tmp_path / name, model_type=name) for name in ("llama", "qwen3"))
    asked = ("--algo", "ppo", "--devices", "16", "--model", actor, "--yaml", str(tmp_path / "run.yaml"))
    command.run((*asked, "--reward", reward, "--top", "1"))
    assert "reward has model_type='qwen3'" in capsys.readouterr().out
    assert accepted(tmp_path / "run.yaml").settings.engine == "fsdp"


@pytest.mark.parametrize("more", [{}, {"rope_parameters": LLAMA3}, {"model_type": "qwen2"}])
def test_models_that_megatron_takes_are_divided(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: dict[str, object]
) -> None:
    path, file = model(tmp_path / "model", **more), tmp_path / "run.yaml"
    command.run(("--algo", "ppo", "--devices", "16", "--model", path, "--yaml", str(file), "--top", "1"))
    assert "replicas on FSDP" not in capsys.readouterr().out
    assert accepted(file).settings.engine == "megatron"


@pytest.mark.parametrize("source", ["llama-7b", "directory", "config.json"])
def test_a_step_that_asks_for_the_tokenizer_is_read_where_there_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str
) -> None:
    directory = model(tmp_path / "model")
    given = {"directory": directory, "config.json": f"{directory}/config.json"}.get(source, source)
    name = "examples.written_verdict.WrittenVerdict"
    command.run(("--algo", name, "--devices", "8", "--model", given, "--batch", "8", "--top", "1"))
    assert "generation 2 " in capsys.readouterr().out


def test_models_that_do_not_fit_whole_are_told_why_they_are(tmp_path: Path) -> None:
    path = model(tmp_path / "model", model_type="qwen3")
    with pytest.raises(
        ValueError, match=r"do not fit.*Only replicas .* were looked at: actor has model_type"
    ):
        command.run(("--algo", "ppo", "--devices", "1", "--model", path))
