"""What is said of lists among options, and of groups of options in lists."""

from __future__ import annotations

import pytest

import rlhf_lightning.strategies  # noqa: F401 - whose options are looked up
from rlhf_lightning.usage import option_error

OWNER = "Problem with given class_path 'rlhf_lightning.strategies.auto.MappingOption':\n"


@pytest.mark.parametrize(
    ("tried", "told"),
    [
        (
            f'{OWNER}  Parser key "pools":\n    Expected a dot import path string: roles',
            ": pools: is a list. Type '[{roles: ...}]', with the brackets.",
        ),
        (
            "Parser key \"functions\":\n  - Expected a <class 'dict'>\n"
            "  - Expected a <class 'str'>. Got value: {'length': 0.1}\n  - Expected a <class 'str'>",
            "functions: {'length': 0.1} stands in a list. Type a list of names, or one mapping of all.",
        ),
        (
            "  - Problem with given class_path 'rlhf_lightning.callbacks.Rollouts':\n"
            "      Option 'dir' is not accepted\n"
            "  - Problem with given class_path 'lightning.Callback':\n      Option 'dir' is not accepted",
            "rlhf_lightning.callbacks.Rollouts: Option 'dir' is not accepted",
        ),
    ],
    ids=["group", "mapping", "twice"],
)
def test_what_is_said_of_a_list(tried: str, told: str) -> None:
    assert told in option_error(tried, {})
    assert "lightning.Callback" not in option_error(tried, {})
