"""Options where nobody takes them: refused with the one to type instead, or taken wherever they stand."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rlhf_lightning import cli, entry
from rlhf_lightning.controller.connection import TERMINATED
from tests.unit.rlhf import FIT, SHORT, Rlhf

pytestmark = pytest.mark.usefixtures("in_own_directory")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*FIT, "--trainer.devices", "2"), ("--trainer.devices 2", "them: --strategy.devices N.")),
        ((*FIT, "--trainer.precision", "bf16"), ("--trainer.precision", "--algo.actor.dtype bfloat16")),
        ((*FIT, "--trainer.strategy", "ddp"), ("--trainer.strategy", "--strategy NAME")),
        ((*FIT, "--trainer.accelerator=gpu"), ("--trainer.accelerator=gpu", "leave the option out")),
        (
            (*FIT, "--trainer.barebones", "true"),
            ("--trainer.barebones", "false --trainer.enable_progress_bar false."),
        ),
        ((*FIT, "--trainer.num_nodes", "2"), ("--trainer.num_nodes", "--strategy.address HOST:PORT")),
        (
            (*FIT, *SHORT, "--trainer.gradient_clip_val", "0.5"),
            ("gradient_clip_val=0.5", "Type --algo.actor.optimizer.grad_clip 0.5"),
        ),
        (
            (*FIT, *SHORT, "--trainer.accumulate_grad_batches", "4"),
            ("accumulate_grad_batches=4", "--algo.mini_batch_size ROWS", "max_tokens_per_micro_batch TOKENS"),
        ),
        ((*FIT, "--algo.actor.sampling.temp", "1"), ("--sampling.temp", "Did you mean temperature?")),
        (
            (*FIT, "--strategy.settings.train.max_tokens", "2"),
            ("--train.max_tokens", "Did you mean max_tokens_per_micro_batch?"),
        ),
        (("fit", "--algo", "grpo", "--algo.kl.coef", "1"), ("--kl.coef", "Did you mean reward_kl_coef?")),
        (
            ("fit", "--algo", "grpo", "--data.path", "prompts.jsonl"),
            ("TaskData: Option 'path'", "path is an option of --data completiondata, ", ", promptdata"),
        ),
        (("fit", "--algo", "dpo", "--beta", "0.1"), ("--beta 0.1", "Did you mean --algo.loss.beta?")),
        (
            ("fit", "--algo", "rewardmodel", "--learning_rate=1e-5"),
            ("--learning_rate=1e-5", "Did you mean --algo.reward.optimizer.lr?"),
        ),
        (("fit", "--lr", "1e-5"), ("--lr 1e-5", "Did you mean --algo.actor.optimizer.lr?")),
        (
            (*FIT, "--trainer.callbacks+=SecondReward", "--trainer.callbacks.func=length"),
            ("SecondReward: Option 'func'", "Did you mean functions?"),
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) if value[0] == "fit" else "",
)
def test_an_option_that_has_another_name(rlhf: Rlhf, words: tuple[str, ...], said: tuple[str, ...]) -> None:
    message = rlhf.refused(*words)
    assert [part for part in said if part not in message] == [], message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "map --algo grpo --model llama-7b --devices 8 --max-resident -1",
            "--max-resident -1: type 0 for no limit.",
        ),
        (
            "map --algo grpo --model llama-7b --devices 8 --prompt 64 --real-prompt 64.5",
            "--real-prompt 64.5: must lie between 0 and --prompt 64.",
        ),
    ],
)
def test_a_number_that_is_out_of_its_range(rlhf: Rlhf, words: str, said: str) -> None:
    assert rlhf.refused(*words.split()) == said


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("devices: 2", "'trainer.devices'. The strategy divides them: --strategy.devices N."),
        ("precision: bf16-mixed", "'trainer.precision'. Each model has a type: --algo.actor.dtype bfloat16."),
        ("gradient_clip_val: 1.0", "Type --algo.actor.optimizer.grad_clip 1.0"),
    ],
)
def test_a_trainers_option_in_a_configuration_that_others_decide(rlhf: Rlhf, option: str, said: str) -> None:
    text = f"algo: ppo\ndata: {{class_path: taskdata, init_args: {{num_rows: 200}}}}\ntrainer: {{{option}}}\n"
    Path("mine.yaml").write_text(text, encoding="utf-8")
    assert said in rlhf.refused("fit", "-c", "mine.yaml")


@pytest.mark.parametrize("option", ["--strategy.devices", "--trainer.devices"])
def test_devices_of_a_strategy_that_has_one(rlhf: Rlhf, option: str) -> None:
    said = "Local has one: --strategy colocated --strategy.devices N."
    assert rlhf.refused(*FIT, *SHORT, "--strategy", "local", option, "2").endswith(said)
    text = "algo: ppo\ndata: {class_path: taskdata, init_args: {num_rows: 200}}\nstrategy: local\n"
    Path("mine.yaml").write_text(text, encoding="utf-8")
    assert rlhf.refused("fit", "-c", "mine.yaml", option, "2").endswith(said)


@pytest.mark.parametrize("value", ["3", "[1, 2]", "null", "adamw"])
def test_one_value_for_the_options_of_a_part(rlhf: Rlhf, value: str) -> None:
    """The parser takes numbers, lists and null, of which no part can be made."""
    Path("mine.yaml").write_text(
        f"algo: {{class_path: grpo, init_args: {{actor: {{optimizer: {value}}}}}}}\ndata: taskdata\n", "utf-8"
    )
    message = rlhf.refused("fit", "-c", "mine.yaml", "--strategy", "local")
    given = {"null": "None"}.get(value, value)
    typed = "Type its options one by one, such as optimizer.lr."
    said = f"optimizer: '{given}' is not a group of options. {typed}"
    assert message.endswith(f"Actor: {said}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--algo.group_size", "4", "--algo", "grpo", *SHORT), ("GRPO", 4, 128)),
        (("--algo", "grpo", "--data.batch_size", "4", "--data", "taskdata"), ("GRPO", 8, 4)),
        (
            ("--algo.group_size=4", *SHORT, "--algo=grpo", "--data.batch_size=2", "--data=taskdata"),
            ("GRPO", 4, 2),
        ),
        (("--algo.group_size", "4", "--algo", "grpo", "-c", "later.yaml"), ("GRPO", 6, 4)),
        (("-c", "later.yaml", "--algo.group_size", "4", "--algo", "rloo"), ("RLOO", 4, 4)),
        (("--algo", "ppo", "--algo.group_size", "4", "--algo", "grpo", *SHORT), ("GRPO", 4, 128)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[1], str) else "",
)
def test_the_options_of_a_class_may_stand_before_its_name(
    rlhf: Rlhf, words: tuple[str, ...], expected: tuple[str, int, int]
) -> None:
    Path("later.yaml").write_text(
        "algo: {class_path: grpo, init_args: {group_size: 6}}\n"
        "data: {class_path: taskdata, init_args: {batch_size: 4}}\n",
        encoding="utf-8",
    )
    out = rlhf.succeeds("fit", *words, "--print_config")
    found = yaml.safe_load(out)
    algo, data = found["algo"], found["data"]["init_args"]
    said = (algo["class_path"].rpartition(".")[2], algo["init_args"]["group_size"], data["batch_size"])
    assert said == expected


def test_options_of_a_class_that_nobody_has_named(rlhf: Rlhf) -> None:
    message = rlhf.refused("fit", "--algo.group_size", "4", "--data", "taskdata")
    assert "'group_size' is not accepted. Name the class before its options, such as --algo ppo" in message


def test_predict_has_no_option_that_nothing_reads(rlhf: Rlhf) -> None:
    out = rlhf.succeeds("predict", "--help")
    assert "--ckpt_path" in out
    assert "return_predictions" not in out
    out = rlhf.succeeds("predict", "--algo", "ppo", "--print_config")
    Path("mine.yaml").write_text(out, encoding="utf-8")
    for command in ("fit", "validate"):
        assert rlhf.run(command, "-c", "mine.yaml", "--print_config")[0] == 0


@pytest.mark.parametrize(
    ("exits", "asked", "code"),
    [(SIGTERMException(), False, 143), (SystemExit(1), True, 143), (SystemExit(1), False, 1)],
)
def test_a_run_that_is_told_to_end_says_so(
    monkeypatch: pytest.MonkeyPatch, exits: SystemExit, *, asked: bool, code: int
) -> None:
    """Lightning's exception is an exit without a code, Ray's has that of an error, as after Ctrl-C."""

    def ended(words: object) -> None:
        raise exits

    monkeypatch.setattr(cli, "CommandLine", ended)
    monkeypatch.setattr(TERMINATED, "is_set", lambda: asked)
    monkeypatch.setattr(sys, "argv", ["rlhf", "fit"])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == code


def test_a_callback_that_could_not_save_is_refused_before_anything_starts(rlhf: Rlhf) -> None:
    """Lightning's own would end the run at its first checkpoint, perhaps after hours."""
    place = "/proc/tty"  # is there, and takes no files, not even of root
    saves = ("--trainer.callbacks+=ModelCheckpoint", f"--trainer.callbacks.dirpath={place}")
    assert rlhf.refused(*FIT, *saves, *SHORT).startswith(f"ModelCheckpoint: {place} cannot be written (")


def test_the_command_comes_first(rlhf: Rlhf) -> None:
    Path("mine.yaml").write_text("algo: ppo\n", encoding="utf-8")
    said = "the first word is not a command. Choose from fit,"
    assert rlhf.refused("-c", "mine.yaml", "fit").startswith(said)
    assert rlhf.refused("--print_config", "fit").startswith(said)
    assert rlhf.refused("--print_config", *FIT).startswith(said)


def test_a_trace_needs_a_file(rlhf: Rlhf) -> None:
    """Its directory would be found out only at the end of the run."""
    said = "Trace: out is a directory. Type a file in it: out/trace.json."
    Path("out").mkdir()
    assert rlhf.refused(*FIT, *SHORT, "--trace", "out") == said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EPIPE])
def test_a_full_disk_is_named_without_a_file(
    number: int, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))  # as a write does, which knows no name

    monkeypatch.setattr(cli, "CommandLine", fails)
    if number != errno.EPIPE:
        said = f"the disk of trainer.default_root_dir, or of a logger: {os.strerror(number)}."
        assert rlhf.refused(*FIT) == said
    else:
        with pytest.raises(BrokenPipeError):
            rlhf.run(*FIT)
