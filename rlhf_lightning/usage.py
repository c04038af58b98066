"""Errors of a command on one line: what was typed, what is wrong with it, what to type instead.

jsonargparse reports a wrong option in many lines, one or more for each type that the option may have. Those
that say nothing about the user's mistake are dropped, and what was probably meant is added.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from rlhf_lightning.field_types import type_hints
from rlhf_lightning.names import FOLDERS, choices
from rlhf_lightning.options import dataclasses_in, factory
from rlhf_lightning.other_systems import known_elsewhere

_NOT_THEIRS = ("<", f"{Path(__file__).parent}{os.sep}", *sysconfig.get_paths().values())
"""How the paths of files begin that the user did not write."""
_SET_UP = ("<module>", "__init__", "__post_init__", "setup")
"""Functions in which options are refused, where the place says nothing about the mistake."""
_TRIED = re.compile(
    r"- (Expected a <class '(NoneType|list)'>|Expected a path but|Does not validate)|"
    r"Does not validate|Subtypes:|Errors:|Given value|$"
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
_UNKNOWN = re.compile(r"(?i:option '|unrecognized arguments: --)([\w.-]+)")
"""An unknown option, in the words of jsonargparse or of argparse."""
_WORD = re.compile(r"unrecognized arguments: (\S+)")
"""A single word that belongs to no option."""
_ASSIGNED = re.compile(r"unrecognized arguments: \+*([\w.]+)=")
"""An option in the form that verl has: without dashes, and with its value behind `=`."""
_DOTTED = re.compile(r"Expected a dot import path string: (\S+)")
"""A name that is no class path."""
_EXPECTED = re.compile(r"- (Expected a|Not a valid subclass of) ")
"""What a type wants, which says nothing where a line says what is wrong."""
_PLACE = re.compile(r"(- )?(Parser key|Problem with given class_path) ")
"""Lines that say where something is wrong, and not what."""
_GIVEN = re.compile(r"Given value: (?!NestedArg|Namespace)(\S.*)")
_REQUIRED = re.compile(r"(the following arguments are required: [\w, ]+?) Expected a <class .*")
"""A missing option of a class; the rest of the line is about other types that the option may have."""
_REQUIRED_CLASS = re.compile(r"\b(?:fit|validate|predict)\.(algo|data)\b(?=, |$)")
"""A missing option of the command, by its name in the parser."""
_NO_GROUP = re.compile(r"Unable to load config (?:'.*' [\w.]+: Unable to load config )?\"(.*)\"$")
"""A single value where a group of options is wanted."""
_NO_LIST = re.compile(r"Expected a <class 'tuple'>\. Got value: (.+)$")
"""A single value where a list is wanted."""
_ONE_KIND = re.compile(r"Subclasses are disabled for (\w+), thus '([\w.]+)' is not accepted .*")
_MISSING = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'$")
_NAMED = {
    "callbacks": ("rlhf_lightning.callbacks", "lightning.pytorch.callbacks"),
    "logger": ("lightning.pytorch.loggers",),
    "plugins": ("lightning.pytorch.plugins",),
}
"""Modules whose classes the trainer's options take without their path."""
_OWN = ("config", "seed_everything", "trace", "ckpt_path", "print_config")
"""Options of the command itself."""
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Kinds of the parameters `*args` and `**kwargs`."""
_CLASS = re.compile(r"class_path '([\w.]+)'")


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
    said, classes = _shortened(message), _CLASS.findall(message)
    if unknown := _UNKNOWN.search(message):
        option = unknown[1].replace("-", "_")
        decided = elsewhere.get(option) or elsewhere.get(f"trainer.{option}")
        instead = decided or _option_suggestion(option, classes, owners)
        return f"{said}. {instead}"
    if wrong := _DOTTED.search(said) or _NO_GROUP.search(said):
        key = " ".join(re.findall(r"[\w.]+", said[: wrong.start()])[-1:])
        what = "is no class" if wrong.re is _DOTTED else "is no group of options"
        group = (_default_types(_load(classes[-1])) if classes else owners).get(key)
        first = next((name for name in _options(group) if f"{key}.{name}" not in elsewhere), "path")
        return f"{said[: wrong.start()]}{wrong[1]!r} {what}.{_class_suggestion(wrong[1], key, first)}"
    if bare := _ASSIGNED.match(said):
        meant = known_elsewhere(bare[1]) and _option_suggestion(bare[1], (), owners)
        return f"{said}. Options begin with two dashes. {meant or f'Type --{_WORD.findall(said)[0]}.'}"
    typed = _WORD.fullmatch(said)
    if typed and typed[1].endswith((".yaml", ".yml")):
        return f"{said}. {_meant(f'-c {typed[1]}')}"
    if kind := next((kind for kind in FOLDERS if typed and typed[1] in choices(kind)), ""):
        return f"{said}. {_meant(f'--{kind} {said.split()[-1]}')}"
    said = _ONE_KIND.sub(_one_kind, _NO_LIST.sub(_as_list, _REQUIRED.sub(r"\1", said)))
    said = _REQUIRED_CLASS.sub(r"--\1 NAME", said)
    return _MISSING.sub(_with_similar_name, said) + _QUOTES * bool(_READ_AS_YAML.search(said))


def _shortened(message: str) -> str:
    """The lines of a message that say what is wrong, on one line, with the value that was given."""
    lines = [line.strip() for line in message.splitlines()]
    told = [line for line in lines if not _TRIED.match(line)]
    told = [line for line in told if not _FORMS.match(line)] or told
    if any(not _EXPECTED.match(line) and not _PLACE.match(line) for line in told):
        told = [line for line in told if not _EXPECTED.match(line) or _DOTTED.search(line)]
    said = " ".join(line.removeprefix("- ") for line in told)
    given = _GIVEN.search(message)
    wants = "Expected a" in said or "Not a valid subclass" in said
    if given and wants and "Got value" not in said and not _DOTTED.search(said):
        said = f"{said}. Got value: {given[1]}"
    said = re.sub(r'Parser key "([\w.]+)":', r"\1:", said)
    return re.sub(r"Problem with given class_path '([\w.]+)':", r"\1:", said)


@contextmanager
def naming_role(name: str) -> Iterator[None]:
    """Put the role's name before errors about `path` or `lora`, so that they name an option of it.

    Raises:
        ValueError: one was raised within.
    """
    try:
        yield
    except ValueError as err:
        said = str(err)
        raise ValueError(f"{name}.{said}" if said.startswith(("path=", "lora")) else said) from err


def library_error(err: Exception) -> str:
    """An error that a library of the command raised about its use, on one line; empty for any other error."""
    *_, (frame, _) = traceback.walk_tb(err.__traceback__)
    said = " ".join(str(err).split())
    if type(err).__module__.startswith("wandb."):
        return f"wandb: {said} Or try --trainer.logger.offline true."
    if type(err).__module__.startswith("jsonargparse."):  # a logger's directory without room for config.yaml
        return f"{said}."
    raised_there = str(frame.f_globals.get("__name__")).startswith("lightning.")
    return said if type(err) is RuntimeError and raised_there else ""


def place_of(err: Exception) -> str:
    """Where the user's own code was when an error was raised; empty if it was not there, or in a set-up."""
    frames = [f for f in traceback.extract_tb(err.__traceback__) if not f.filename.startswith(_NOT_THEIRS)]
    if not frames or frames[0].name in _SET_UP:
        return ""
    path = Path(frames[-1].filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}, line {frames[-1].lineno}, in {frames[-1].name}"


def _as_list(found: re.Match[str]) -> str:
    """The error for one value where a list is wanted."""
    several = re.fullmatch(r"[\w.-]+(, ?[\w.-]+)+", found[1])
    words = re.split(", ?", found[1]) if several else [found[1]]
    number = re.compile(r"-?\d+(\.\d+)?")
    items = [word if number.fullmatch(word) else json.dumps(word, ensure_ascii=False) for word in words]
    return f"{found[1]} is no list. Type '[{', '.join(items)}]', with the brackets."


def _one_kind(found: re.Match[str]) -> str:
    """The error for a class where there is no choice of one."""
    return f"{found[2]} is a class, and there is none to choose. Type the options of {found[1]} one by one."


def _with_similar_name(found: re.Match[str]) -> str:
    """The error for a name that a module lacks, with the nearest name that it has."""
    module, name = found.groups()
    near = get_close_matches(name, vars(importlib.import_module(module)), n=1)
    return f"{found[0]}. {_meant(*near)}" if near else found[0]


def _class_suggestion(name: str, key: str, first: str) -> str:
    """What was meant by a name that is no class: a callback or logger of a similar name, or options.

    Args:
        name: what was typed.
        key: the option; empty where none is known.
        first: the first option below that one.
    """
    modules = _NAMED.get(key.rpartition(".")[2])
    if modules is None:
        return f" Type its options one by one, such as {key}.{first}." if key else " Type its import path."
    known = [each for module in modules for each in importlib.import_module(module).__all__]
    low = {each.lower(): each for each in known}
    if name in known:
        return " There is one of this name, but a package that it needs is not installed."
    begun = [each for each in low if name and each.startswith(name.lower())]
    found = begun[:1] or get_close_matches(name.lower(), low, n=1)
    return f" {_meant(*(low[each] for each in found))}" if found else " Type its import path."


def _option_suggestion(option: str, classes: Sequence[str], owners: Mapping[str, type]) -> str:
    """What an unknown option was probably meant to be, or else a list of the options."""
    tried = [_load(cls) for cls in classes]
    owner: object = next((cls for cls in reversed(tried) if _options(cls)), None)
    if tried and owner is None:
        return (
            "Name the class before its options, such as --algo ppo or --data promptdata; in a file, in "
            "class_path, with the options in init_args."
        )
    first, *rest = option.split(".")
    if not tried and (found := [prefix for prefix, cls in owners.items() if first in _options(cls)]):
        return _meant(f"--{found[0]}.{option}")
    if not tried and (here := known_elsewhere(option)):
        return here if isinstance(here, str) else _meant(f"--{here[0]}")
    kinds = [kind for kind in FOLDERS if any(first in _options(cls) for cls in choices(kind).values())]
    if not tried and kinds:
        return _meant(f"--{kinds[0]}.{option}")
    while rest and (inner := (_default_types(owner) if owner else owners).get(first)):
        owner, (first, *rest) = inner, rest
    if not isinstance(owner, type):
        return _meant(*get_close_matches(first, [*FOLDERS, *owners, *_OWN], n=1)) or "Try --help."
    said = _untyped(first, owner) or _similar_option([first, *rest], owner)
    return said or f"{owner.__name__} has: {', '.join(_options(owner))}."


def _meant(*options: str) -> str:
    """The question whether one of these was meant; empty for none."""
    return f"Did you mean {' or '.join(options)}?" if options else ""


def _untyped(name: str, owner: type) -> str:
    """Advice to annotate a plain number or text of a class, which is no option yet; empty if it is none."""
    typed = {each for base in owner.__mro__ for each in inspect.get_annotations(base)}
    value, made = vars(owner).get(name), getattr(owner, "__dataclass_params__", None)
    by_hand = made is None or not made.init
    if by_hand or name in typed or not isinstance(value, bool | int | float | str):
        return ""
    line = f"{name}: {type(value).__name__} = {value!r}"
    return f"{name} is an attribute of {owner.__name__} without a type. Write `{line}` there."


def _similar_option(words: Sequence[str], owner: type) -> str:
    """The most similar option of a class, or the classes that have the unknown one; empty if none is."""
    here = known_elsewhere(".".join(words))
    if isinstance(here, str):
        return here
    modules = [base.__module__ for base in owner.__mro__]
    kinds = [kind for kind, folder in FOLDERS.items() if any(name.startswith(folder) for name in modules)]
    elsewhere = [f"--{path}" for path in here if path.partition(".")[0] not in kinds]
    if found := _similar(words, [path.partition(".")[2] for path in here], elsewhere[:1], owner):
        return _meant(*found)
    for name in (words[0], *(path.split(".")[1] for path in here)):
        having = {kind: [k for k, cls in choices(kind).items() if name in _options(cls)] for kind in kinds}
        if any(having.values()):
            kind = next(kind for kind in kinds if having[kind])
            return f"{name} is an option of --{kind} {', '.join(having[kind][:4])}."
    return ""


def _similar(words: Sequence[str], here: Sequence[str], elsewhere: list[str], owner: type) -> list[str]:
    """The one or two options of a class that are most similar to an unknown one; empty for none.

    Args:
        words: the unknown option, without dots.
        here: what another system's option of this name is here, if a class has it.
        elsewhere: the same, of another class.
        owner: the class.
    """
    typed, paths = "_".join(words), paths_of(owner)
    flat = {path: path.replace(".", "_") for path in paths}
    named = [path for path in (*here, f"{typed.removesuffix('_model')}.path") if path in paths]
    same = [path for path in paths if flat[path] == typed]
    begun = [known for known in _options(owner) if len(typed) > 1 and known.startswith(typed)]
    inside = [path for path in paths if path.endswith(f".{words[-1]}")]
    ends = [path for path in paths if flat[path].endswith(f"_{typed}") or typed.endswith(f"_{flat[path]}")]
    alike = get_close_matches(typed, flat.values(), n=1)
    close = [path for path in paths if flat[path] in alike]
    both = [*dict.fromkeys([*ends[:1], *inside[:1]])]
    tries = (named[:1], [*same, *ends][:2] if same else [], begun[:1], both, elsewhere, close[:1])
    return next((found for found in tries if found), [])


def paths_of(owner: object) -> list[str]:
    """The options of a class, then with dots those of the dataclasses among them."""
    names, nested = _options(owner), _default_types(owner)
    inside = ((name, nested[name]) for name in names if name in nested)
    return [*names, *(f"{name}.{path}" for name, inner in inside for path in paths_of(inner))]


def _options(owner: object) -> list[str]:
    """Names of the options of a class; none of a constructor's `*args` and `**kwargs`."""
    parameters = inspect.signature(owner).parameters.values() if isinstance(owner, type) else ()
    return [parameter.name for parameter in parameters if parameter.kind not in _ANY]


def _default_types(owner: object) -> dict[str, type]:
    """Classes of the options that are dataclasses, by name of the option."""
    fields = dataclasses.fields(owner) if isinstance(owner, type) and dataclasses.is_dataclass(owner) else ()
    hints = type_hints(owner) if fields else {}
    made = {f.name: (factory(f), *dataclasses_in(hints.get(f.name, f.type))) for f in fields}
    classes = {name: [c for c in found if isinstance(c, type)] for name, found in made.items()}
    return {name: found[0] for name, found in classes.items() if found and dataclasses.is_dataclass(found[0])}


def _load(path: str) -> object:
    module, _, name = path.rpartition(".")
    found: object = getattr(importlib.import_module(module), name)
    return found
