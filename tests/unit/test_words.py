"""Words of a command line that are taken as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

import rlhf_lightning.strategies  # noqa: F401 - among which names are looked for; ray writes to the environment
from rlhf_lightning.names import class_path
from rlhf_lightning.words import chosen, read_config, resolved


def test_a_class_may_have_options_that_its_signature_does_not_name(tmp_path: Path) -> None:
    """As jsonargparse writes and reads those of `**kwargs`, and `--print_config` gives them."""
    path, data = tmp_path / "mine.yaml", {"class_path": "a.B", "init_args": {"c": 1}, "dict_kwargs": {"d": 2}}
    path.write_text(json.dumps({"data": data}), encoding="utf-8")
    assert json.loads(read_config(str(path)))["data"] == data


@pytest.mark.parametrize(
    "text",
    [
        "algo: grpo\nalgo.actor.epochs: 3\n",
        "algo: {class_path: grpo, init_args: {actor.epochs: 3}}\n",
        "algo: {class_path: grpo, init_args: {actor: {optimizer.epochs: 3, optimizer: {lr: 1.0}}}}\n",
        "data: taskdata\ntrainer.epochs: 3\n",
    ],
)
def test_an_option_with_dots_is_one_of_the_command_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=rf"^-c {path}: \S+: dots are .* Write epochs below \S+, indented\.$"
    ):
        read_config(str(path))
    path.write_text("algo: {class_path: grpo, init_args: {reward: {by_source: {gsm8k.main: length}}}}\n")
    assert "gsm8k.main" in read_config(str(path))


def test_signs_of_every_kind(tmp_path: Path) -> None:
    """The parser, which reads YAML, gets the texts of the file."""
    path, signs = (
        tmp_path / "mine.yaml",
        '\U0001f600 é\x00\n\x7f\x85\x9f\u2028\u2029\ud7ff\ue000\ufeff\uffff\\ "',
    )
    data = {"class_path": "a.B", "init_args": {"c": "", "d": [signs]}}
    path.write_text(yaml.safe_dump({"data": data}, allow_unicode=True), encoding="utf-8")
    assert yaml.load(read_config(str(path)), yaml.CSafeLoader)["data"] == data


def test_a_group_without_a_value_has_its_defaults(tmp_path: Path) -> None:
    """As where everything below it is a comment."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "algo: grpo\nstrategy:\n  # class_path: local\ntrainer:\ndata: taskdata\nseed_everything: null\n"
    )
    assert set(json.loads(read_config(str(path)))) == {"algo", "data", "seed_everything"}


def test_the_class_that_was_chosen_last(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("algo: dpo\ndata: preferencedata\n")
    (tmp_path / "other.yaml").write_text("trainer: {max_steps: 3}\n")
    mine, other = (("-c", str(tmp_path / name)) for name in ("mine.yaml", "other.yaml"))
    for words, name in (
        ((), "PPO"),
        (("--algo", "grpo"), "GRPO"),
        (("--algo=grpo",), "GRPO"),
        (mine, "DPO"),
        ((*mine, *other), "DPO"),
        ((*mine, "--algo", "kto"), "KTO"),
        (("--algo", "kto", *mine), "DPO"),
    ):
        assert chosen(resolved(["fit", *words]), "algo") == f"rlhf_lightning.algos.{name}"
    assert not chosen(resolved(["fit", *other]), "algo")
    assert chosen(resolved(["fit", "--algo", "mine.Mine"]), "algo") == "mine.Mine"


@pytest.mark.parametrize("words", ["--algo --strategy local", "--strategy local --algo"])
def test_an_option_without_its_name(words: str) -> None:
    with pytest.raises(ValueError, match=r"^--algo: which one\? Type --algo NAME: cispo, "):
        resolved(["fit", *words.split()])


@pytest.mark.parametrize("words", ["-c", "--config", "-c --algo ppo"])
def test_a_configuration_without_its_name(words: str) -> None:
    option = words.split(maxsplit=1)[0]
    with pytest.raises(ValueError, match=rf"^{option}: which file\? Type {option} FILE"):
        resolved(["fit", *words.split()])


def test_a_file_of_the_name_of_a_kind_hides_it_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taskdata").touch()
    assert class_path("data", "taskdata") == "rlhf_lightning.data.TaskData"
    Path("rows").touch()
    with pytest.raises(ValueError, match="--data rows: is a file"):
        class_path("data", "rows")
    with pytest.raises(
        ValueError, match=r"--data no/rows\.jsonl: is a file\. Type the kind too: --data prompt"
    ):
        class_path("data", "no/rows.jsonl")


@pytest.mark.parametrize("behind", ["", "--trainer.max_steps 3", "--strategy local"])
def test_an_option_without_a_value(behind: str) -> None:
    """The parser would say that --strategy expects an argument."""
    with pytest.raises(ValueError, match=r"--strategy\.offload: no value stands behind it. Type .* true, or"):
        resolved(["fit", "--algo", "grpo", "--strategy.offload", *behind.split()])
    resolved(["fit", "--algo", "grpo", "--strategy.offload=true", "--algo.stop", "-1e-6", "--print_config"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "algo:\n  class_path: grpo\n   init_args:\n",
            "line 3: is not YAML: mapping values are not .* column",
        ),
        ("algo:\n  a:\n    b: 1\n   c: 2\n", "line 4: is not YAML: expected <block end>.* column"),
        ("algo:\n\tclass_path: grpo\n", "line 2: is not YAML: found character .* column"),
        ("algo: {path: 'x}\n", "line 2: is not YAML: found unexpected end of stream.* column"),
        ("a: \x01\n", r"mine\.yaml: is not YAML \(unacceptable character"),
        ("algo: ppo\ndata: taskdata\nalgo: grpo\n", "line 3: is not YAML: algo stands there twice"),
        ("trainer: {max_steps: 1,\n  max_steps: 2}\n", "line 2: is not YAML: max_steps stands there twice"),
        (b"algo: \xff\n", r"mine\.yaml: is not UTF-8"),
        ("algo:\n  class_path: grpo\ninit_args:\n  epochs: 2\n", "init_args stands outside .* Indent it"),
        ("algo:\nclass_path: grpo\ninit_args:\n  epochs: 2\n", "class_path stands outside .* Indent it"),
        ("algo:\n  class_path: grpo\n  init_args:\nepochs: 2\n", "algo: init_args has no options"),
        ("algo:\n  class_path: grpo\n  init_args: 3\n", "algo: init_args has no options"),
        (
            "trainer:\n  callbacks:\n  - class_path: EarlyStopping\n    monitor: val/reward\n",
            "trainer.callbacks: monitor: write options of a class under init_args",
        ),
    ],
)
def test_slips_of_indentation(tmp_path: Path, text: str | bytes, message: str) -> None:
    """What is said names the file and, where the parser knows it, the line, on one line."""
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as error:
        read_config(str(path))
    assert str(error.value).startswith(f"-c {path}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", ["--ds.adam_offload", "--actor.packing_samples", "--algo.kl.use_loss"])
def test_a_flag_of_another_system_is_left_to_what_answers_unknown_options(flag: str) -> None:
    words = resolved(["fit", "--algo", "grpo", "--data", "taskdata", flag, "--algo.epochs", "3"])
    assert f"{flag}=true" in words
    for ours in ("--algo.actor.optimizer.weight_decay", "--trainer.logger"):
        with pytest.raises(ValueError, match=rf"^{ours}: no value stands behind it"):
            resolved(["fit", "--algo", "grpo", "--data", "taskdata", ours, "--algo.epochs", "3"])


def test_an_engine_in_place_of_a_strategy() -> None:
    said = (
        r"Did you mean deepspeed-chat\? A strategy places models; --strategy\.settings\.engine fsdp, zero or"
    )
    with pytest.raises(ValueError, match=said):
        class_path("strategy", "deepspeed")
