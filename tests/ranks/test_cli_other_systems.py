"""What options of other systems are answered with is taken by the parser."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from rlhf_lightning.names import FOLDERS, choices
from rlhf_lightning.options import option_classes, option_paths
from rlhf_lightning.other_systems import OTHERS
from tests.unit.rlhf import Rlhf

VALUES = {
    "dtype": "float32",
    "engine": "fsdp",
    "functions": "exact_match",
    "function": "null",
    "length_average": "false",
    "enforce_eager": "true",
    "enable_prefix_caching": "true",
    "chat_template_options": "{}",
}
"""Of options without a default that tells its type."""
STAND_FOR = {"N": "1", "NAME": "x", "DIRECTORY": "x", "CLASS": "CSVLogger"}
"""Words of a sentence, and what a user may type for them."""


def answered() -> set[str]:
    """The options of algorithms, data and strategies that are answered, in sentences too."""
    paths = {path for here in OTHERS.values() if not isinstance(here, str) for path in here}
    said = " ".join(here for here in OTHERS.values() if isinstance(here, str))
    paths |= {str(path) for path in re.findall(r"--([a-z]+\.[\w.]+\w)", said)}
    return {path for path in paths if path.partition(".")[0] in FOLDERS}


def a_value(cls: type, path: str) -> str:
    """A value that an option takes: its default, or one of its type."""
    first, _, rest = path.partition(".")
    if rest:
        return a_value(option_classes(cls)[first], rest)
    default = inspect.signature(cls).parameters[first].default
    plain = str(default) if isinstance(default, str) else json.dumps(default, default=lambda _: 1)
    return VALUES.get(first, "1" if default is None else plain)


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_parser_takes_what_is_answered(rlhf: Rlhf, kind: str) -> None:
    left = {path.partition(".")[2] for path in answered() if path.startswith(f"{kind}.")}
    assert len(left) > 8
    for short, cls in choices(kind).items():
        if mine := sorted(left & set(option_paths(cls))):
            others = ["--algo", "grpo", "--data", "promptdata", "--data.path", "x"]
            words = [*others, f"--{kind}", short, *(f"--{kind}.{path}={a_value(cls, path)}" for path in mine)]
            rlhf.succeeds("fit", *words, "--print_config")
            left -= set(mine)
    assert not left


def test_the_parser_takes_the_callbacks_and_loggers_that_are_answered(rlhf: Rlhf) -> None:
    said = {here for here in OTHERS.values() if isinstance(here, str)}
    typed = r"--trainer\.(?:callbacks\+=|logger )[A-Z]\w+(?: --trainer\.[\w.]+ (?:NAME|N|DIRECTORY))*"
    found = sorted({words for here in said for words in re.findall(typed, here)})
    assert len(found) == 9
    loggers = [words for words in found if "logger" in words]
    for words in (*loggers, " ".join(sorted(set(found) - set(loggers)))):
        filled = [STAND_FOR.get(word, word) for word in words.split()]
        rlhf.succeeds("fit", "--algo", "grpo", "--data", "taskdata", *filled, "--print_config")
