"""Rewrites the words of a command line for jsonargparse: short names, configuration files, order, numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

from rlhf_lightning.names import FOLDERS, choices, class_path
from rlhf_lightning.yaml_files import read_yaml

EMBEDDED_CONFIG = Path(__file__).parent / "configs" / "embedded.yaml"
_FORM = re.compile(r"\.(class_path|init_args|dict_kwargs)\b")
"""Keys that the parser reads with dots itself."""
_NESTED = re.compile(r"--\w+(\.\w+)+")
"""An option with a group, of which each takes a value."""
_NAMED = {f"--{option}{ending}": option for option in FOLDERS for ending in ("", ".help")}
"""Options that take the name of a class, and of which."""
_NEGATIVE = re.compile(r"-[\d.]+e[+-]?\d+", re.IGNORECASE)


def read_config(path: str) -> str:
    """A configuration file as JSON text, with short names of classes replaced by their class paths.

    Raises:
        ValueError: there is no such file, it is no YAML mapping, or options stand at another level.
    """
    groups = (*FOLDERS, "trainer")
    # A group without a value, as where everything below it is a comment, has its defaults.
    content = {k: value for k, value in _read_mapping(path).items() if value is not None or k not in groups}
    for name in ("class_path", "init_args"):
        if name in content:
            raise ValueError(
                f"-c {path}: {name} stands outside algo, strategy and data. Indent it, below one."
            )
    for option in FOLDERS:
        value = content.get(option)
        if isinstance(value, str):
            value = {"class_path": value}
        if isinstance(value, dict) and "class_path" in value:
            content[option] = _class_options(value, _with_dots(content, option), path=path, option=option)
    return json.dumps(content, default=str)  # YAML reads dates, which JSON lacks


def _with_dots(content: dict[object, object], option: str) -> dict[str, object]:
    """Take options of a class that stand beside it, `algo.epochs: 2`, out of the content of a file."""
    keys = [key for key in content if str(key).startswith(f"{option}.") and not _FORM.search(str(key))]
    return {str(key).removeprefix(f"{option}."): content.pop(key) for key in keys}


def _class_options(
    value: dict[object, object], dotted: dict[str, object], *, path: str, option: str
) -> dict[object, object]:
    """A class and its options with the class path, and with further options.

    Args:
        value: class_path and init_args, as a file has them.
        dotted: the further options, by names with dots.
        path: the file, for messages.
        option: algo, strategy or data.

    Raises:
        ValueError: the name of the class is unknown, or options stand at another level.
    """
    named = value | {"class_path": class_path(option, str(value["class_path"]))}
    if beside := sorted(map(str, value.keys() - {"class_path", "init_args", "dict_kwargs"})):
        raise ValueError(
            f"-c {path}: {option}: {', '.join(beside)}: write options of a class under init_args, beside "
            "class_path."
        )
    options = value.get("init_args", {})
    if not isinstance(options, dict):
        raise ValueError(
            f"-c {path}: {option}: init_args has no options. Indent them below it, or leave it out."
        )
    return named | {"init_args": options | dotted} if dotted else named


def _read_mapping(path: str) -> dict[object, object]:
    """The options of a file, as they stand there.

    Raises:
        ValueError: there is no such file, or it is no YAML mapping.
    """
    content = read_yaml(path, shown=f"-c {path}")
    if not isinstance(content, dict):
        raise ValueError(f"-c {path}: holds no options, such as `algo: ppo`.")
    return content


def resolved(arguments: Sequence[str]) -> list[str]:
    """The command line with short names and configuration files replaced by what they stand for.

    Raises:
        ValueError: an unknown name, a configuration file that cannot be read, an option without a value, or
            help on a part of no class.
    """
    result = list(arguments[:1])
    joined = _with_negative_numbers(arguments[1:])
    words = [part for word in joined for part in _split_at_equals(word)]
    _check_values(words)
    words = _classes_first(_help_on_parts(words))
    command = bool(result) and not result[0].startswith("-")
    if command and not {"-c", "--config", "--data", "-h", "--help"} & set(words):
        result += ["-c", read_config(str(EMBEDDED_CONFIG))]
    for previous, word in pairwise(["", *words]):
        if previous in ("-c", "--config"):
            result.append(read_config(word))
        elif previous in _NAMED:
            result.append(class_path(_NAMED[previous], word))
        else:
            result.append(word)
    return result


def _with_negative_numbers(words: Sequence[str]) -> list[str]:
    """`--lr -1e-6` as one word, since argparse takes -1 for a number and -1e-6 for an option."""
    result: list[str] = []
    for word in words:
        option = bool(result) and result[-1].startswith("--") and "=" not in result[-1]
        if option and _NEGATIVE.fullmatch(word):
            result[-1] += f"={word}"
        else:
            result.append(word)
    return result


def _split_at_equals(word: str) -> list[str]:
    """`--algo=ppo` as two words; everything else as it is."""
    name, equals, value = word.partition("=")
    return [name, value] if equals and name in {"--config", *_NAMED} else [word]


def _check_values(words: Sequence[str]) -> None:
    """Refuse options behind which the next one stands."""
    for word, after in pairwise([*words, "--"]):
        if word in _NAMED and after.startswith("-"):
            known = ", ".join(sorted(choices(_NAMED[word])))
            raise ValueError(f"{word}: of which? Type {word} NAME: {known}.")
        if _NESTED.fullmatch(word) and after.startswith("--") and not word.endswith(".help"):
            raise ValueError(f"{word}: no value stands behind it. Type {word} true, or another value.")


def _help_on_parts(words: list[str]) -> list[str]:
    """`--algo ppo --algo.actor.sampling.help`, rewritten as `--algo.help ppo --algo.actor.help`."""
    for word in words:
        option, *parts = word.removeprefix("--").split(".")
        if option in FOLDERS and parts[1:] and parts[-1] == "help":
            names = [name for before, name in pairwise(words) if _NAMED.get(before) == option]
            if not names:
                raise ValueError(f"{word}: of which? Type --{option}.help NAME {word}.")
            return [f"--{option}.help", names[-1], f"--{option}.{parts[0]}.help"]
    return words


def _classes_first(words: Sequence[str]) -> list[str]:
    """The words with `--algo ppo` and its like before the options of that class, wherever they were typed.

    No word moves past a configuration file, so that what comes later still overrides what came before.
    """
    done: list[str] = []
    classes: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("-c", "--config"):
            done += [*classes, *others, word, *islice(rest, 1)]
            classes, others = [], []
        elif word in {f"--{option}" for option in FOLDERS}:
            classes += [word, *islice(rest, 1)]
        else:
            others.append(word)
    return [*done, *classes, *others]
