"""Rewrites the words of a command line for jsonargparse: short names, configuration files, order, numbers."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from rlhf_lightning.names import FOLDERS, choices, class_path, imported
from rlhf_lightning.options import has_option, option_classes
from rlhf_lightning.other_systems import known_elsewhere
from rlhf_lightning.yaml_files import read_yaml

EMBEDDED_CONFIG = Path(__file__).parent / "configs" / "embedded.yaml"
_FORM = ("class_path", "init_args", "dict_kwargs")
"""Keys of a class with options."""
_NOT_PLAIN = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Characters that YAML takes as escapes only. Above U+FFFF it is the reverse: JSON's pairs are none to it."""
_NESTED = re.compile(r"--\w+(\.\w+)+")
"""An option with a group, of which each takes a value."""
_NAMED = {f"--{option}{ending}": option for option in FOLDERS for ending in ("", ".help")}
"""Options that take the name of a class, and of which."""
_CONFIG = ("-c", "--config")
"""Options that take a configuration file."""
_NEGATIVE = re.compile(r"-[\d.]+e[+-]?\d+", re.IGNORECASE)
_QUOTED = re.compile(r"""".*"|'.*'""", re.DOTALL)
"""A text in the quotes of YAML."""


def read_config(path: str) -> str:
    """A configuration file as JSON text, with short names of classes replaced by their class paths.

    Raises:
        ValueError: there is no such file, it is no YAML mapping, or options stand at another level, or twice.
    """
    groups = (*FOLDERS, "trainer")
    # A group without a value, as where everything below it is a comment, has its defaults.
    content = {k: value for k, value in _read_mapping(path).items() if value is not None or k not in groups}
    _check_dots(content, path)
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
            content[option] = _class_options(value, path=path, option=option)
    trainer = content.get("trainer")
    for name in ("callbacks", "logger"):
        given = trainer.get(name) if isinstance(trainer, dict) else None
        for each in given if isinstance(given, list) else [given]:
            _check_beside(each, path, f"trainer.{name}")
    return _as_json(content)


def _as_json(content: object) -> str:
    """JSON that is YAML too."""
    text = json.dumps(content, default=str, ensure_ascii=False)  # YAML reads dates, which JSON lacks
    return _NOT_PLAIN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def as_handed_on(word: str) -> str:
    """`--option=VALUE` for the parser of a part, to which a list or a mapping comes as Python prints it.

    There a line break in quotes is an escape, and to YAML two letters.
    """
    name, _, value = word.partition("=")
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return word
    return f"{name}={_as_json(found)}" if isinstance(found, list | dict) else word


def _check_dots(options: dict[object, object], path: str) -> None:
    """Refuse `algo.epochs: 2`: the parser would read the group anew, and lose what else stands there."""
    if dotted := [str(key) for key in options if "." in str(key)]:
        group, _, last = dotted[0].rpartition(".")
        raise ValueError(
            f"-c {path}: {dotted[0]}: dots are for the command line. Write {last} below {group}, indented."
        )


def _class_options(value: dict[object, object], *, path: str, option: str) -> dict[object, object]:
    """A class and its options with the class path.

    Args:
        value: class_path and init_args, as a file has them.
        path: the file, for messages.
        option: algo, strategy or data.

    Raises:
        ValueError: the name of the class is unknown, or options stand at another level.
    """
    named = value | {"class_path": class_path(option, str(value["class_path"]))}
    _check_beside(value, path, option)
    options = value.get("init_args", {})
    if not isinstance(options, dict):
        raise ValueError(
            f"-c {path}: {option}: init_args has no options. Indent them below it, or leave it out."
        )
    _check_below(options, imported(str(named["class_path"])), path)
    return named


def _check_beside(value: object, path: str, option: str) -> None:
    """Refuse options that stand beside the class that they are of, and not under init_args."""
    if not isinstance(value, dict) or "class_path" not in value:
        return
    if beside := sorted(map(str, value.keys() - {*_FORM})):
        raise ValueError(
            f"-c {path}: {option}: {', '.join(beside)}: write options of a class under init_args, beside "
            "class_path."
        )


def _check_below(options: dict[object, object], owner: object, path: str) -> None:
    """Refuse dots in names of a class's options, and of the options below them."""
    _check_dots(options, path)
    for name, inner in option_classes(owner).items():
        if isinstance(below := options.get(name), dict):
            _check_below(below, inner, path)


def _read_mapping(path: str) -> dict[object, object]:
    """The options of a file, as they stand there.

    Raises:
        ValueError: there is no such file, or it is no YAML mapping.
    """
    content = read_yaml(path, shown=f"-c {path}")
    if not isinstance(content, dict):
        raise ValueError(f"-c {path}: holds no options, such as `algo: ppo`.")
    return content


def config_files(arguments: Sequence[str]) -> list[str]:
    """The configuration files that a command line names."""
    words = [part for word in arguments for part in _split_at_equals(word)]
    return [word for option, word in pairwise(words) if option in _CONFIG]


def resolved(arguments: Sequence[str]) -> list[str]:
    """The command line with short names and configuration files replaced by what they stand for.

    Raises:
        ValueError: an unknown name, a configuration file that cannot be read, an option without a value, or
            help on a part of no class.
    """
    result = list(arguments[:1])
    joined = _joined(arguments[1:])
    words = [part for word in joined for part in _split_at_equals(word)]
    words = [_unquoted(word) for word in _classes_first(_help_on_parts(_with_values(words)))]
    command = bool(result) and not result[0].startswith("-")
    if command and not {*_CONFIG, "--data", "-h", "--help"} & set(words):
        result += ["-c", read_config(str(EMBEDDED_CONFIG))]
    for previous, word in pairwise(["", *words]):
        if previous in _CONFIG:
            result.append(read_config(word))
        elif previous in _NAMED:
            result.append(class_path(_NAMED[previous], word))
        else:
            result.append(word)
    return result


def chosen(words: Sequence[str], option: str) -> str:
    """The class path that an option has at last, of words that are resolved; empty where it has none."""
    found = ""
    for previous, word in pairwise(words):
        if previous == f"--{option}":
            found = word
        elif previous in _CONFIG:
            given = json.loads(word).get(option)
            found = str(given.get("class_path", found)) if isinstance(given, dict) else found
    return found


def _joined(words: Sequence[str]) -> list[str]:
    """`--lr -1e-6` as one word, since argparse takes -1 for a number and -1e-6 for an option; quotes too."""
    result: list[str] = []
    for word in words:
        option = bool(result) and result[-1].startswith("--") and "=" not in result[-1]
        if option and (_NEGATIVE.fullmatch(word) or _QUOTED.fullmatch(word)):
            result[-1] += f"={word}"
        else:
            result.append(word)
    return result


def _unquoted(word: str) -> str:
    """`--option="text"` without the quotes of YAML, which the parser would leave in the text.

    A text that is a mapping, a list or a date to YAML goes to its class in JSON.
    """
    option, _, value = word.partition("=")
    if not option.startswith("--") or not _QUOTED.fullmatch(value):
        return word
    try:
        text = yaml.safe_load(value)
    except yaml.YAMLError:  # quotes that begin the text, and others that end it
        return word
    first, *_ = option.removeprefix("--").split(".")
    if first not in FOLDERS or _is_plain(text):
        return f"{option}={text}"
    group, _, name = option.rpartition(".")
    return f"{group}.init_args={_as_json({name: text})}"


def _is_plain(text: str) -> bool:
    """Whether YAML reads a text as such, or as a number, which is a text to the parser where one is due."""
    try:
        return isinstance(yaml.safe_load(text), str | int | float | None)
    except yaml.YAMLError:
        return True


def _split_at_equals(word: str) -> list[str]:
    """`--algo=ppo` as two words; everything else as it is."""
    name, equals, value = word.partition("=")
    return [name, value] if equals and name in {"--config", *_NAMED} else [word]


def _with_values(words: Sequence[str]) -> list[str]:
    """The words, with `=true` behind flags of other systems: the parser answers an unknown option, no flag.

    Raises:
        ValueError: the next option stands behind one that needs a value.
    """
    result: list[str] = []
    for word, after in pairwise([*words, "--"]):
        if word in _NAMED and after.startswith("-"):
            known = ", ".join(sorted(choices(_NAMED[word])))
            raise ValueError(f"{word}: which one? Type {word} NAME: {known}.")
        if word in _CONFIG and after.startswith("-"):
            raise ValueError(f"{word}: which file? Type {word} FILE, a configuration in YAML.")
        alone = _NESTED.fullmatch(word) and after.startswith("--") and not word.endswith(".help")
        if alone and not _is_theirs(word.removeprefix("--")):
            raise ValueError(f"{word}: no value stands behind it. Type {word} true, or another value.")
        result.append(f"{word}=true" if alone else word)
    return result


def _is_theirs(option: str) -> bool:
    """Whether an option is known from another system, and is none of a class here."""
    kind, _, rest = option.partition(".")
    here = choices(kind).values() if kind in FOLDERS else ()
    return bool(known_elsewhere(option)) and not any(has_option(cls, rest) for cls in here)


def _help_on_parts(words: list[str]) -> list[str]:
    """`--algo ppo --algo.actor.sampling.help`, rewritten as `--algo.help ppo --algo.actor.help`."""
    for word in words:
        option, *parts = word.removeprefix("--").split(".")
        if option in FOLDERS and parts[1:] and parts[-1] == "help":
            names = [name for before, name in pairwise(words) if _NAMED.get(before) == option]
            if not names:
                raise ValueError(f"{word}: of which class? Type --{option}.help NAME {word}.")
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
        if word in _CONFIG:
            done += [*classes, *others, word, *islice(rest, 1)]
            classes, others = [], []
        elif word in {f"--{option}" for option in FOLDERS}:
            classes += [word, *islice(rest, 1)]
        else:
            others.append(word)
    return [*done, *classes, *others]
