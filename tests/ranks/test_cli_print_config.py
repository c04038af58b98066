"""What `--print_config` prints is a configuration that gives the same again."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from rlhf_lightning.names import choices
from tests.unit.rlhf import Rlhf

pytestmark = pytest.mark.usefixtures("in_own_directory")
CALLBACKS = ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=50")
TEXTS = ("--algo.actor.sampling.stop_strings", r"""['</a>', 'x: y', "it's", '\n\nHuman:', 'null', '12']""")
SIGNS = ("--algo.actor.sampling.stop_strings", r"""["\U0001F600 é\u2028\x85\uFEFF\x7f", "\x9b\uE000"]""")
MAIN = ("--data.main", "rlhf_lightning.data.PromptData", "--data.main.path", "a.jsonl")
PTX = ("--data.ptx", "rlhf_lightning.data.TextData", "--data.ptx.path", "b.jsonl")
PARTS = ("--data", "mixeddata", *MAIN, *PTX)
FILE = ("--data", "promptdata", "--data.path", "a.jsonl", "--data.data_source", "'12'")
TEMPLATE = ("--data.prompt_template", r'"Q: {prompt}\nA:"')
VARIABLES = ("--data.chat_template_options", "{x: 1.5, y: 'no'}")
SOURCES = ("--algo.reward.by_source", "{a: {length: 1}, 'b: c': {too_long: 1e-3}}")
LOGGER = ("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs")


def same_again(rlhf: Rlhf, *words: str) -> None:
    """Print a configuration, and that of it."""
    first = rlhf.succeeds("fit", *words, "--print_config")
    Path("mine.yaml").write_text(first, encoding="utf-8")
    second = rlhf.succeeds("fit", "-c", "mine.yaml", "--print_config")
    assert second == first


@pytest.mark.parametrize(
    ("algorithm", "strategy"), zip(sorted(choices("algo")), cycle(sorted(choices("strategy"))), strict=False)
)
def test_defaults(rlhf: Rlhf, algorithm: str, strategy: str) -> None:
    """Each algorithm and each strategy, in pairs: neither reads the options of the other."""
    same_again(rlhf, "--algo", algorithm, "--strategy", strategy)


@pytest.mark.parametrize(
    "words",
    [
        ("--algo.actor.lora.rank", "4", "--algo.actor.optimizer.lr", "1e-6", *TEXTS),
        ("--algo.reward.functions", "[length]", "--trainer.max_time", "{hours: 2}", *CALLBACKS),
        ("--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:00:00:08"),
        SIGNS,
        (*FILE, *TEMPLATE, *VARIABLES, *SOURCES),
        (*PARTS, "--trace", "x.json", "--ckpt_path", "last", *LOGGER),
    ],
    ids=("adapters and texts", "callbacks", "a timer", "signs", "a file", "two files and a logger"),
)
def test_options(rlhf: Rlhf, words: tuple[str, ...]) -> None:
    same_again(rlhf, "--algo", "ppo", *words)


def test_texts_are_those_that_yaml_reads(rlhf: Rlhf) -> None:
    """In quotes or in a list, with a line break, a colon or an apostrophe, at each depth."""
    template, stops = r'"Q: {prompt}\nA:"', r"""["\n\n", 'a\b', "it's", "é\u2028"]"""
    words = ["--algo", "grpo", "--algo.actor.sampling.stop_strings", stops, *FILE]
    words += ["--data.prompt_template", template, r'--algo.reward.separator="\n\n"', "--trace", "'a b'"]
    out = rlhf.succeeds("fit", *words, "--print_config")
    given = yaml.safe_load(out)
    roles, data = given["algo"]["init_args"], given["data"]["init_args"]
    assert roles["actor"]["init_args"]["sampling"]["stop_strings"] == yaml.safe_load(stops)
    assert (data["prompt_template"], data["data_source"]) == ("Q: {prompt}\nA:", "12")
    assert (roles["reward"]["init_args"]["separator"], given["trace"]) == ("\n\n", "a b")
    out = rlhf.succeeds(
        "fit", "--algo", "ppo", *PARTS, "--data.main.prompt_template", template, "--print_config"
    )
    main = yaml.safe_load(out)["data"]["init_args"]["main"]["init_args"]
    assert (main["prompt_template"], main["path"]) == ("Q: {prompt}\nA:", "a.jsonl")


@pytest.mark.parametrize("null", ["null", "None"])
def test_null_is_taken_at_every_depth(rlhf: Rlhf, null: str) -> None:
    options = ("algo.stop_kl", "algo.kl.target", "algo.value_loss.clip", "algo.policy_loss.dual_clip")
    others = ("algo.actor.dtype", "algo.scaling.reward_clip", "algo.actor.lora")
    words = [word for option in options + others for word in (f"--{option}", null)]
    out = rlhf.succeeds("fit", "--algo", "ppo", *words, "--print_config")
    given = yaml.safe_load(out)["algo"]["init_args"]
    for option in (*options, *others):
        part = given
        for name in option.split(".")[1:]:
            part = part.get("init_args", part)[name]
        assert part is None, option


def test_none_is_null_as_a_whole_value_alone(rlhf: Rlhf) -> None:
    words = ("--data", "promptdata", "--data.path", "x.jsonl", "--data.prompt_template", "{prompt} x=None")
    out = rlhf.succeeds("fit", "--algo", "ppo", *words, "--algo.stop_kl=None", "--print_config")
    given = yaml.safe_load(out)
    assert given["data"]["init_args"]["prompt_template"] == "{prompt} x=None"
    assert given["algo"]["init_args"]["stop_kl"] is None
