"""Errors of a command on one line: what was typed, what is wrong with it, what to type instead.

jsonargparse reports a wrong option in many lines, one or more for each type that the option may have. Those
that say nothing about the user's mistake are dropped, and what was probably meant is added.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType

from rlhf_lightning.names import FOLDERS, choices, meant
from rlhf_lightning.options import has_option, option_classes, option_names, option_paths
from rlhf_lightning.other_systems import known_elsewhere
from rlhf_lightning.other_values import value_elsewhere

TWO_DASHES = "Options begin with two dashes."
"""Said of an option without them; `recipe` says it once of several."""
_NOT_THEIRS = ("<", f"{Path(__file__).parent}{os.sep}", *sysconfig.get_paths().values())
"""How the paths of files begin that the user did not write."""
_SET_UP = ("<module>", "__init__", "__post_init__", "setup")
"""Functions in which options are refused, where the place says nothing about the mistake."""
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
_NO_LIST = re.compile(r"(\w+): Expected a <class 'tuple'>\. Got value: (.+)$")
"""A single value where a list is wanted."""
_MIXED = re.compile(r"Expected a <class 'dict'> Expected a <class 'str'>\. Got value: (\{.*?\}).*")
"""A mapping in a list, where a list of texts or a mapping is wanted."""
_ONE_KIND = re.compile(r"Subclasses are disabled for (\w+), thus '([\w.]+)' is not accepted .*")
_NAMED = {
    "callbacks": ("rlhf_lightning.callbacks", "lightning.pytorch.callbacks"),
    "logger": ("lightning.pytorch.loggers",),
    "plugins": ("lightning.pytorch.plugins",),
}
"""Modules whose classes the trainer's options take without their path."""
_OWN = ("config", "seed_everything", "trace", "ckpt_path", "print_config")
"""Options of the command itself."""
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
    if valued := value_elsewhere(message):
        dashes = f" {TWO_DASHES}" * bool(_ASSIGNED.match(said))
        said = _NO_LIST.sub(r"\1: \2 is not a list", _DOTTED.sub(r"'\1' is not a class", said))
        return f"{said}.{dashes} {_of_model(valued, owners.get('algo'), kind='algo')}"
    if unknown := _UNKNOWN.search(message):
        option = unknown[1].replace("-", "_")
        decided = _decided(option, elsewhere)
        return f"{said}. {decided}" if decided else f"{said}.{_suggestion(option, classes, owners)}"
    if wrong := _DOTTED.search(said) or _NO_GROUP.search(said):
        key = " ".join(re.findall(r"[\w.]+", said[: wrong.start()])[-1:])
        what = "is not a class" if wrong.re is _DOTTED else "is not a group of options"
        group = (option_classes(resolve_name(classes[-1])) if classes else owners).get(key)
        first = next((name for name in option_names(group) if f"{key}.{name}" not in elsewhere), "path")
        told = f"{wrong[1]!r} {what}.{_class_suggestion(wrong[1], key, first)}"
        if wrong[1] in option_names(group):  # `pools.roles`, of a list of groups
            told = f"is a list. Type '[{{{wrong[1]}: ...}}]', with the brackets."
        return said[: wrong.start()] + told
    given = _GIVEN.search(message)
    if (other := _OTHER.search(said)) and (name := other[1] or (given and given[1])):
        advice = "Type the import path of one, such as my_package.my_module.Mine."
        return f"{said[: other.start()]}{name} is not a subclass of {other[2]}. {advice}"
    if suggestion := _word_suggestion(said, owners, elsewhere=elsewhere):
        return f"{said}.{suggestion}"
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
    if "," in name:
        return f" Type them one by one: {' '.join(f'--{key}+={each}' for each in name.split(',') if each)}"
    known = [each for module in modules for each in importlib.import_module(module).__all__]
    low = {each.lower(): each for each in known}
    if name in known:
        return " There is one of this name, but a package that it needs is not installed."
    begun = [each for each in low if name and each.startswith(name.lower())]
    found = begun[:1] or get_close_matches(name.lower(), low, n=1)
    return meant(*(low[each] for each in found)) or " Type its import path."


def _word_suggestion(said: str, owners: Mapping[str, type], *, elsewhere: Mapping[str, str]) -> str:
    """What a word without dashes was meant to be; empty where the error is about none, or nobody knows."""
    if bare := _ASSIGNED.match(said):
        option = bare[2]
        if option not in elsewhere and _is_option(option, owners):
            return f" {TWO_DASHES} Type --{bare[1]}."
        decided = _decided(option, elsewhere)
        meant_by = f" {decided}" if decided else _suggestion_of_command(option, owners)
        return f" {TWO_DASHES}{meant_by}"
    if not (alone := _WORD.fullmatch(said)):
        return ""
    word = alone[1]
    if word.endswith((".yaml", ".yml")):
        return meant(f"-c {word}")
    return meant(*(f"--{kind} {word}" for kind in FOLDERS if word in choices(kind)))


def _decided(option: str, elsewhere: Mapping[str, str]) -> str | None:
    """What to type instead of an option that the command does not take, with or without `trainer.`."""
    return elsewhere.get(option) or elsewhere.get(f"trainer.{option}")


def _suggestion(option: str, classes: Sequence[str], owners: Mapping[str, type]) -> str:
    """What an unknown option was meant to be, in the last of these classes that has options, or in none."""
    if not classes:
        return _suggestion_of_command(option, owners)
    owner = next((cls for cls in map(resolve_name, reversed(classes)) if option_names(cls)), None)
    if isinstance(owner, type):
        return _suggestion_of_class(option, owner, owners)
    return (
        " Name the class before its options, such as --algo ppo or --data promptdata; in a file, in "
        "class_path, with the options in init_args."
    )


def _suggestion_of_command(option: str, owners: Mapping[str, type]) -> str:
    """What an unknown option of the command was meant to be."""
    here = known_elsewhere(option, owners.get("algo"))
    having = [k for k, cls in owners.items() if has_option(cls, option)]
    if having and {*here}.isdisjoint(_OWN):  # a seed is the run's, although data may have one, too
        return meant(f"--{having[0]}.{option}")
    if here:
        if isinstance(here, str):
            return f" {_of_model(here, owners.get('algo'), kind='algo')}"
        had = [path for path in here if _has(path, owners)][:1]
        of_others = [_of_which(path.removeprefix("algo."), "algo", prefix="--algo.") for path in here]
        if not had and "algo" in owners and any(of_others):
            return "".join(of_others)
        return meant(*(f"--{path}" for path in had or here))
    return _suggestion_of_part(option, owners)


def _suggestion_of_part(option: str, owners: Mapping[str, type]) -> str:
    """What an unknown option of the command was meant to be, by the group that it begins with."""
    first, _, rest = option.partition(".")
    if rest in _OWN:
        return meant(f"--{rest}")
    classes = [*owners.items(), *((kind, cls) for kind in FOLDERS for cls in choices(kind).values())]
    if having := [(prefix, cls) for prefix, cls in classes if first in option_names(cls)]:
        if whole := [prefix for prefix, cls in having if has_option(cls, option)]:
            return meant(f"--{whole[0]}.{option}")
        prefix, cls = having[0]
        return f" Its options begin with --{prefix}.{first}.{_suggestion_of_class(option, cls, owners)}"
    if rest and first in owners:
        return _suggestion_of_class(rest, owners[first], owners)
    if rest and first in FOLDERS:
        return f" No class has it; rlhf fit --{first}.help NAME lists the options of one."
    known = [*FOLDERS, *owners, *_OWN]
    begun = [name for name in known if name.startswith(first)][:1]
    return meant(*(begun or get_close_matches(first, known, n=1, cutoff=0.8))) or " Try --help."


def _is_option(option: str, owners: Mapping[str, type]) -> bool:
    """Whether the command takes this option, of the class that was chosen or, where none was, of any."""
    prefix, _, rest = option.partition(".")
    if not rest:
        return prefix in (*FOLDERS, *_OWN)
    if prefix == "trainer":  # whose loggers and callbacks have options of their own
        return rest.partition(".")[0] in option_names(owners.get(prefix))
    classes = [owners[prefix]] if prefix in owners else choices(prefix).values() if prefix in FOLDERS else ()
    return any(has_option(cls, rest) for cls in classes)


def _of_model(here: str, owner: object, *, kind: str) -> str:
    """A sentence about options of the actor, for the model that an algorithm without one trains.

    Args:
        here: the sentence.
        owner: the class in which, or beside which, the unknown option was typed.
        kind: algo, strategy or data; empty for a model or a part of one, whose options have no prefix here.
    """
    trained = [name for name in ("actor", "reward", "cost") if name in option_names(owner)]
    model = f"--algo.{trained[0]}." if trained else "--algo.actor." if kind else ""
    return here.replace("--algo.actor.", model)


def _has(path: str, owners: Mapping[str, type]) -> bool:
    """Whether the class that was chosen has this option."""
    kind, _, rest = path.partition(".")
    return has_option(owners.get(kind), rest)


def _of_which(path: str, kind: str, *, prefix: str = "") -> str:
    """Which classes of a kind have an option, as a sentence; empty where none has."""
    having = [short for short, cls in choices(kind).items() if has_option(cls, path)]
    more = f" and {len(having) - 4} more" if len(having) > 4 else ""
    return f" {prefix}{path} is an option of --{kind} {', '.join(having[:4])}{more}." if having else ""


def _suggestion_of_class(option: str, owner: type, owners: Mapping[str, type]) -> str:
    """What an unknown option of a class was meant to be, or else a list of those that it has."""
    first, _, rest = option.partition(".")
    if rest and (inner := option_classes(owner).get(first)):
        return _suggestion_of_class(rest, inner, owners)
    if untyped := _untyped(first, owner):
        return untyped
    modules = [base.__module__ for base in owner.__mro__]
    kind = next((k for k, folder in FOLDERS.items() if any(m.startswith(folder) for m in modules)), "")
    here = known_elsewhere(f"{kind}.{option}" if kind else option, owner)
    if isinstance(here, str):
        return f" {_of_model(here, owner, kind=kind)}"
    if not kind:  # a part, of which what the chosen algorithm lacks is no other name
        here = tuple(path for path in here if path.partition(".")[0] not in owners or _has(path, owners))
    lacks = f"{kind}.{option}" in here or (rest and first != "actor" and _is_model(first))
    if not lacks and (found := _similar(option, owner, here=here, kind=kind)):
        return meant(*found)
    for name in (first, *(path.split(".")[1] for path in here)) if kind else ():
        if of_others := _of_which(name, kind):
            return of_others
    return f" {owner.__name__} has: {', '.join(option_names(owner))}."


def _is_model(name: str) -> bool:
    """Whether an algorithm has a model of this name, for whose options those of another are no answer."""
    return any("path" in option_names(option_classes(cls).get(name)) for cls in choices("algo").values())


def _untyped(name: str, owner: type) -> str:
    """Advice to annotate a plain number or text of a class, which is no option yet; empty if it is none."""
    typed = {each for base in owner.__mro__ for each in inspect.get_annotations(base)}
    value, made = vars(owner).get(name), getattr(owner, "__dataclass_params__", None)
    by_hand = made is None or not made.init
    if by_hand or name in typed or not isinstance(value, bool | int | float | str):
        return ""
    line = f"{name}: {type(value).__name__} = {value!r}"
    return f" {name} is an attribute of {owner.__name__} without a type. Write `{line}` there."


def _similar(option: str, owner: type, *, here: Sequence[str], kind: str) -> list[str]:
    """The one or two options that are most similar to an unknown one of a class; empty for none.

    Args:
        option: the unknown one.
        owner: the class.
        here: what other systems' option of this name is here, in classes of this kind or of another.
        kind: algo, strategy or data; empty for other classes.
    """
    typed = option.replace(".", "_")
    flat = {path: path.replace(".", "_") for path in option_paths(owner)}
    below = [path.partition(".")[2] for path in here]
    within = [path.partition(".")[2] for path in below]  # of a model or a loss
    named = [*below, *within, f"{typed.removesuffix('_model')}.path", option.replace("_model.", ".")]
    if found := [path for path in named if path in flat]:
        return found[:1]
    ends = [path for path in flat if flat[path].endswith(f"_{typed}") or typed.endswith(f"_{flat[path]}")]
    if same := [path for path in flat if flat[path] == typed]:
        return [*same, *ends][:2]
    if len(typed) > 1 and (begun := [name for name in option_names(owner) if name.startswith(typed)]):
        return begun[:1]
    inside = [path for path in flat if path.endswith(f".{option.rpartition('.')[2]}")]
    if found := list(dict.fromkeys([*ends[:1], *inside[:1]])):
        return found
    of_others = [f"--{path}" for path in here if path.partition(".")[0] != kind]
    close = get_close_matches(typed, flat.values(), n=1)
    return [*of_others, *(path for path in flat if flat[path] in close)][:1]


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
