"""Errors of a command on one line: what was typed, what is wrong with it, what to type instead.

jsonargparse reports a wrong option in many lines, one or more for each type that the option may have. Those
that say nothing about the user's mistake are dropped, and what was probably meant is added (`suggestion`).
Of a recipe of another system, typed as it is, each option is told on a line of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pkgutil import resolve_name
from types import MappingProxyType

from rlhf_lightning import suggestion
from rlhf_lightning.names import FOLDERS, choices, meant
from rlhf_lightning.options import option_classes, option_names
from rlhf_lightning.other_values import value_elsewhere

_TWO_DASHES = "Options begin with two dashes."
"""Said of an option without them, once of several."""
_TRIED = re.compile(
    r"- Expected a (<class '(NoneType|list)'>|path but)|"
    r"(- )?Does not validate|Subtypes:|Errors:|Given value|$"
)
"""Lines about types that were tried in vain."""
_FORMS = re.compile(r"Subclass types expect one of|- a (class path|dict with)")
"""Lines about how a class can be written, which says nothing where one refuses its options."""
_READ_AS_YAML = re.compile(r"Expected a <class 'str'>\. Got value: [{\[]")
"""A text with a colon or a bracket, which was read as a mapping or a list."""
_QUOTES = (
    " It was read as YAML, in which colons and brackets mean something: quote the text twice, such as "
    "'\"Question: {prompt}\"'."
)
_HEAD = "unrecognized arguments: "
"""What argparse says before the words that belong to no option."""
_OPTION = re.compile(r"--[\w.-]+(=.*)?|\+*[\w.]+=.*")
"""How an option begins, in the form of TRL and OpenRLHF or in that of verl; other words are its values."""
_UNKNOWN = re.compile(r"(?i:option '|unrecognized arguments: --)([\w.-]+)")
"""An unknown option, in the words of jsonargparse or of argparse."""
_WORD = re.compile(r"unrecognized arguments: (\S+)")
"""A single word that belongs to no option."""
_ASSIGNED = re.compile(r"unrecognized arguments: \+*(([\w.]+)=\S*)")
"""An option in the form that verl has: without dashes, and with its value behind `=`."""
_DOTTED = re.compile(r"Expected a dot import path string: ?(\S*)")
"""A name that is no class path."""
_OTHER = re.compile(r"Import path (?:([\w.]+) )?does not correspond to a subclass of (\w+)$")
"""A module or another class in the place of a class."""
_LACKING = re.compile(r"(algo|strategy|data): [\w.]+: module '([\w.]+)' has no attribute '(\w+)'$")
"""A name in the place of a class that its module lacks."""
_EXPECTED = re.compile(r"- (Expected a|Not a valid subclass of) ")
"""What a type wants, which says nothing where a line says what is wrong."""
_OF_ANY = re.compile(r"(?<=\n) *- Problem with given class_path 'lightning.Callback':\s*Option .* accepted\n")
"""What the class of all callbacks, tried behind that of the user, has no option for."""
_PLACE = re.compile(r"(- )?(Parser key|Problem with given class_path) ")
"""Lines that say where something is wrong, and not what."""
_GIVEN = re.compile(r"Given value: (?!NestedArg|Namespace)(\S.*)")
_REQUIRED = re.compile(r"(the following arguments are required: [\w, ]+?) Expected a <class .*")
"""A missing option of a class; the rest of the line is about other types that the option may have."""
_REQUIRED_CLASS = re.compile(r"\b(?:fit|validate|predict)\.(algo|data)\b(?=, |$)")
"""A missing option of the command, by its name in the parser."""
_NO_GROUP = re.compile(r"Unable to load config (?:'.*' [\w.]+: Unable to load config )?\"(.*)\"$")
"""A single value where a group of options is wanted."""
_NO_FILE = re.compile(
    r"([^\s:]+\.ya?ml): No module named '.*'$|Unexpected import path format: ([^\s:]+\.ya?ml)$"
)
"""A file that is not there, whose name was then taken for that of a class."""
_NO_LIST = re.compile(r"(\w+): Expected a <class 'tuple'>\. Got value: (.+)$")
"""A single value where a list is wanted."""
_MIXED = re.compile(r"Expected a <class 'dict'> Expected a <class 'str'>\. Got value: (\{.*?\}).*")
"""A mapping in a list, where a list of texts or a mapping is wanted."""
_ONE_KIND = re.compile(r"Subclasses are disabled for (\w+), thus '([\w.]+)' is not accepted .*")
_CLASS = re.compile(r"class_path '([\w.]+)'")


def option_errors(message: str, owners: Mapping[str, type], *, elsewhere: Mapping[str, str]) -> str:
    """`option_error`, where the parser does not know several options of each, on a line of its own."""
    words = message.removeprefix(_HEAD).split() if message.startswith(_HEAD) else []
    starts = [place for place, word in enumerate(words) if _OPTION.fullmatch(word)]
    if len(starts) < 2:
        return option_error(message, owners, elsewhere=elsewhere)
    typed = [" ".join(words[start:end]) for start, end in pairwise(sorted({0, *starts, len(words)}))]
    told = [option_error(f"{_HEAD}{each}", owners, elsewhere=elsewhere) for each in typed]
    dashes = f" {_TWO_DASHES}" * any(_TWO_DASHES in each for each in told)
    lines = [each.removeprefix(_HEAD).replace(f" {_TWO_DASHES}", "") for each in told]
    return "\n  ".join([f"{len(lines)} unknown options.{dashes}", *lines])


def option_error(
    message: str, owners: Mapping[str, type], *, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> str:
    """An error of the parser on one line, with what was probably meant.

    Args:
        message: of the error of jsonargparse.
        owners: the classes whose options have a fixed prefix, by that prefix.
        elsewhere: what to type instead, by option, for options of these classes that the command does not
            take.
    """
    message = _OF_ANY.sub("", message)
    said = _NO_FILE.sub(r"\1\2: there is no such file.", _shortened(message))
    classes = _CLASS.findall(message)
    if valued := value_elsewhere(message):
        dashes = f" {_TWO_DASHES}" * bool(_ASSIGNED.match(said))
        said = _NO_LIST.sub(r"\1: \2 is not a list", _DOTTED.sub(r"'\1' is not a class", said))
        return f"{said}.{dashes} {suggestion.for_model(valued, owners.get('algo'), kind='algo')}"
    if unknown := _UNKNOWN.search(message):
        option = unknown[1].replace("-", "_")
        decided = _decided(option, elsewhere)
        return f"{said}. {decided}" if decided else f"{said}.{suggestion.of_option(option, classes, owners)}"
    if wrong := _DOTTED.search(said) or _NO_GROUP.search(said):
        key = " ".join(re.findall(r"[\w.]+", said[: wrong.start()])[-1:])
        what = "is not a class" if wrong.re is _DOTTED else "is not a group of options"
        group = (option_classes(resolve_name(classes[-1])) if classes else owners).get(key)
        first = next((name for name in option_names(group) if f"{key}.{name}" not in elsewhere), "path")
        told = f"{wrong[1]!r} {what}.{suggestion.of_class_name(wrong[1], key, first)}"
        if wrong[1] in option_names(group):  # `pools.roles`, of a list of groups
            told = f"is a list. Type '[{{{wrong[1]}: ...}}]', with the brackets."
        return said[: wrong.start()] + told
    given = _GIVEN.search(message)
    if (other := _OTHER.search(said)) and (name := other[1] or (given and given[1])):
        advice = "Type the import path of one, such as my_package.my_module.Mine."
        return f"{said[: other.start()]}{name} is not a subclass of {other[2]}. {advice}"
    lacking = _LACKING.search(said)
    there = suggestion.of_module(*lacking.groups()) if lacking else ""
    if its_meant := there or _word_meant(said, owners, elsewhere=elsewhere):
        return f"{said}.{its_meant}"
    said = _NO_LIST.sub(_as_list, _REQUIRED.sub(r"\1", said))
    said = _ONE_KIND.sub(
        r"\2 is a class, and there is none to choose. Type the options of \1 one by one.", said
    )
    said = _REQUIRED_CLASS.sub(r"--\1 NAME", said)
    said = _MIXED.sub(r"\1 stands in a list. Type a list of names, or one mapping of all.", said)
    return said + _QUOTES * bool(_READ_AS_YAML.search(said))


def _shortened(message: str) -> str:
    """The lines of a message that say what is wrong, on one line, with the value that was given."""
    lines = [line.strip() for line in message.splitlines()]
    told = [line for line in lines if not _TRIED.match(line)]
    told = [line for line in told if not _FORMS.match(line)] or told
    if any(_DOTTED.search(line) or not (_EXPECTED.match(line) or _PLACE.match(line)) for line in told):
        told = [line for line in told if not _EXPECTED.match(line) or _DOTTED.search(line)]
    said = " ".join(dict.fromkeys(line.removeprefix("- ") for line in told))
    said = re.sub(r" Problem with given class_path '[\w.]+':$", "", said)  # told of another class already
    given = _GIVEN.search(message)
    wants = "Expected a" in said or "Not a valid subclass" in said
    if given and wants and "Got value" not in said and not _DOTTED.search(said):
        said = f"{said}. Got value: {given[1]}"
    said = re.sub(r'Parser key "([\w.]+)":', r"\1:", said)
    return re.sub(r"Problem with given class_path '([\w.]+)':", r"\1:", said)


def _as_list(found: re.Match[str]) -> str:
    """The error for one value, or a mapping, which a text with a colon may be, where a list is wanted."""
    key, value = found.groups()
    several = re.fullmatch(r"[\w.-]+(, ?[\w.-]+)+", value)
    text = re.sub(r"^\{'([^']*)': '([^']*)'\}$", r"\1: \2", value)
    words = re.split(", ?", value) if several else [text]
    number = re.compile(r"-?\d+(\.\d+)?")
    items = [word if number.fullmatch(word) else json.dumps(word, ensure_ascii=False) for word in words]
    if text.startswith("{"):
        items = ["{...}"]
    return f"{key}: {value} is not a list. Type '[{', '.join(items)}]', with the brackets."


def _word_meant(said: str, owners: Mapping[str, type], *, elsewhere: Mapping[str, str]) -> str:
    """What a word without dashes was meant to be; empty where the error is about none, or nobody knows."""
    if bare := _ASSIGNED.match(said):
        option = bare[2]
        if option not in elsewhere and suggestion.is_option(option, owners):
            return f" {_TWO_DASHES} Type --{bare[1]}."
        decided = _decided(option, elsewhere)
        meant_by = f" {decided}" if decided else suggestion.of_command(option, owners)
        return f" {_TWO_DASHES}{meant_by}"
    if not (alone := _WORD.fullmatch(said)):
        return ""
    word = alone[1]
    if word.endswith((".yaml", ".yml")):
        return meant(f"-c {word}")
    return meant(*(f"--{kind} {word}" for kind in FOLDERS if word in choices(kind)))


def _decided(option: str, elsewhere: Mapping[str, str]) -> str | None:
    """What to type instead of an option that the command does not take, with or without `trainer.`."""
    return elsewhere.get(option) or elsewhere.get(f"trainer.{option}")
