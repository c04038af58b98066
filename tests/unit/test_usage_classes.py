"""What is said of classes: of one that its module lacks, and of a callback's value."""

from __future__ import annotations

import pytest

from rlhf_lightning.usage import option_error


@pytest.mark.parametrize(
    ("option", "path", "told"),
    [
        ("algo", "rlhf_lightning.algos.ppo.PPPO", " Did you mean PPO?"),
        ("algo", "rlhf_lightning.algos.safe_rlhf.Mine", " Type one of PPO, SafeRLHF."),
        ("data", "rlhf_lightning.data.Mine", " Type one of CompletionData, "),
        ("strategy", "json.Mine", " No class there is derived from Strategy. Write one, or "),
    ],
)
def test_a_class_that_its_module_lacks(option: str, path: str, told: str) -> None:
    module, _, name = path.rpartition(".")
    said = f"{option}: {path}: module '{module}' has no attribute '{name}'"
    assert option_error(said, {}).startswith(f"{said}.{told}")


def test_what_a_callback_says_of_a_value_stands_alone() -> None:
    own = "- Problem with given class_path 'rlhf_lightning.callbacks.Rollouts':\n  Parser key \"rows\":\n"
    base = "- Problem with given class_path 'lightning.Callback':\n  Option 'rows' is not accepted"
    said = f"{own}    Expected a <class 'int'>. Got value: x\n    {base}\n    - Expected a <class 'NoneType'>"
    told = "rlhf_lightning.callbacks.Rollouts: rows: Expected a <class 'int'>. Got value: x"
    assert option_error(said, {}) == told
