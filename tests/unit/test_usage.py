"""What an unknown option was meant for."""

from __future__ import annotations

import pytest

from rlhf_lightning.usage import refusal


def answer(cls: str, option: str) -> str:
    """What is said of an option that a class lacks."""
    said = f"Problem with given class_path 'rlhf_lightning.{cls}':\n    unrecognized arguments: --{option}=1"
    return refusal(said, {}).partition("=1. ")[2]


@pytest.mark.parametrize(
    ("cls", "option", "expected"),
    [
        ("workers.Actor", "lr", "Did you mean optimizer.lr?"),
        ("algos.PPO", "optimizer.lr", "Did you mean actor.optimizer.lr?"),
        ("algos.PPO", "reward_kl_coef", "Did you mean kl.coef?"),
        ("algos.PPO", "kl_coef", "Did you mean kl.coef or policy_loss.kl_coef?"),
        ("algos.PPO", "kl.coeff", "Did you mean coef?"),
        ("algos.GRPO", "kl.coef", "Did you mean reward_kl_coef?"),
        ("algos.GRPO", "critic.path", "Did you mean actor.path?"),
        ("algos.PPO", "group_size", "group_size is an option of --algo cispo, dapo, gmpo, grpo."),
        ("data.TaskData", "path", "path is an option of --data completiondata, "),
        ("workers.Actor", "optimizer.momentum", "OptimizerSpec has: lr, betas, "),
        ("algos.PPO", "wholly.unknown", "PPO has: actor, critic, "),
    ],
)
def test_what_was_meant(cls: str, option: str, expected: str) -> None:
    assert answer(cls, option).startswith(expected)


def test_a_class_that_refuses_its_options_says_so_alone() -> None:
    tried = (
        "Does not validate against any of the Union subtypes\nErrors:\n  - SampleTable(rows=0): is none.\n"
        "  - Not a valid subclass of Callback\n    Subclass types expect one of:\n    - a class path (str)\n"
        "    - a dict with class_path entry\n  - Expected a <class 'NoneType'>\nGiven value: [...]"
    )
    assert refusal(tried, {}) == "SampleTable(rows=0): is none."
    assert refusal("- Not a valid subclass of Callback", {}) == "Not a valid subclass of Callback"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SampelTable", "Did you mean SampleTable?"),
        ("csv", "Did you mean CSVLogger?"),
        ("8", "Type its import path."),
    ],
)
def test_a_name_that_is_no_class(name: str, meant: str) -> None:
    tried = f"  - Expected a dot import path string: {name}\n  - Expected a <class 'bool'>"
    said = f'Parser key "trainer.logger":\n{tried}'
    assert refusal(said, {}) == f"trainer.logger: {name!r} is no class. {meant}"


def test_what_a_class_lacks_is_said_alone() -> None:
    lacks = "the following arguments are required: save_dir"
    tried = f"  - CSVLogger:\n    {lacks}\n  - Expected a <class 'bool'>. Got value: CSVLogger"
    said = f'Parser key "trainer.logger":\n{tried}'
    assert refusal(said, {}).endswith(lacks)
