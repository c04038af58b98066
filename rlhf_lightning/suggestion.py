"""What was probably meant by an unknown option or class: one of a similar name, or what it is called here.

Sentences that are to stand behind an error begin with a space, and are empty where nobody knows.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pkgutil import resolve_name

from lightning.pytorch import LightningDataModule

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.names import FOLDERS, choices, meant
from rlhf_lightning.options import has_option, option_classes, option_names, option_paths
from rlhf_lightning.other_systems import known_elsewhere
from rlhf_lightning.strategy import Strategy

_NAMED = {
    "callbacks": ("rlhf_lightning.callbacks", "lightning.pytorch.callbacks"),
    "logger": ("lightning.pytorch.loggers",),
    "plugins": ("lightning.pytorch.plugins",),
}
"""Modules whose classes the trainer's options take without their path."""
_BASES = {"algo": RLHFAlgorithm, "strategy": Strategy, "data": LightningDataModule}
"""What the classes of each option are derived from."""
_OWN = ("config", "seed_everything", "trace", "ckpt_path", "print_config")
"""Options of the command itself."""
_IN_FULL = {"algorithm": "algo", "datamodule": "data"}
"""Options of the command by longer names; of verl, options of a group `algorithm` are typed too."""


def of_option(option: str, classes: Sequence[str], owners: Mapping[str, type]) -> str:
    """What an unknown option was meant to be, in the last of these classes that has options, or in none."""
    if not classes:
        return of_command(option, owners)
    owner = next((cls for cls in map(resolve_name, reversed(classes)) if option_names(cls)), None)
    if isinstance(owner, type):
        return _of_class(option, owner, owners)
    return (
        " Name the class before its options, such as --algo ppo or --data promptdata; in a file, in "
        "class_path, with the options in init_args."
    )


def of_command(option: str, owners: Mapping[str, type]) -> str:
    """What an unknown option of the command was meant to be."""
    here = known_elsewhere(option, owners.get("algo"))
    having = [k for k, cls in owners.items() if has_option(cls, option)]
    if having and {*here}.isdisjoint(_OWN):  # a seed is the run's, although data may have one, too
        return meant(f"--{having[0]}.{option}")
    if here:
        if isinstance(here, str):
            return f" {for_model(here, owners.get('algo'), kind='algo')}"
        had = [path for path in here if _has(path, owners)][:1]
        of_others = [_of_which(path.removeprefix("algo."), "algo", prefix="--algo.") for path in here]
        if not had and "algo" in owners and any(of_others):
            return "".join(of_others)
        return meant(*(f"--{path}" for path in had or here))
    return _of_part(option, owners)


def of_class_name(name: str, key: str, first: str) -> str:
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


def of_module(kind: str, module: str, name: str) -> str:
    """What was meant by a class that its module lacks: a similar one, or any there."""
    place, base = importlib.import_module(module), _BASES[kind]
    found = [getattr(place, each) for each in vars(place).get("__all__", dir(place))]
    theirs = [cls for cls in found if isinstance(cls, type) and issubclass(cls, base) and cls is not base]
    known = {cls.__name__ for cls in theirs if not inspect.isabstract(cls)}
    if not known:
        return f" No class there is derived from {base.__name__}. Write one, or type the name of another."
    return meant(*get_close_matches(name, known, n=1)) or f" Type one of {', '.join(sorted(known))}."


def is_option(option: str, owners: Mapping[str, type]) -> bool:
    """Whether the command takes this option, of the class that was chosen or, where none was, of any."""
    prefix, _, rest = option.partition(".")
    if not rest:
        return prefix in (*FOLDERS, *_OWN)
    if prefix == "trainer":  # whose loggers and callbacks have options of their own
        return rest.partition(".")[0] in option_names(owners.get(prefix))
    classes = [owners[prefix]] if prefix in owners else choices(prefix).values() if prefix in FOLDERS else ()
    return any(has_option(cls, rest) for cls in classes)


def for_model(here: str, owner: object, *, kind: str) -> str:
    """A sentence about options of the actor, for the model that an algorithm without one trains.

    Args:
        here: the sentence.
        owner: the class in which, or beside which, the unknown option was typed.
        kind: algo, strategy or data; empty for a model or a part of one, whose options have no prefix here.
    """
    trained = [name for name in ("actor", "reward", "cost") if name in option_names(owner)]
    model = f"--algo.{trained[0]}." if trained else "--algo.actor." if kind else ""
    return here.replace("--algo.actor.", model)


def _of_part(option: str, owners: Mapping[str, type]) -> str:
    """What an unknown option of the command was meant to be, by the group that it begins with."""
    first, _, rest = option.partition(".")
    if rest in _OWN:
        return meant(f"--{rest}")
    classes = [*owners.items(), *((kind, cls) for kind in FOLDERS for cls in choices(kind).values())]
    if having := [(prefix, cls) for prefix, cls in classes if first in option_names(cls)]:
        if whole := [prefix for prefix, cls in having if has_option(cls, option)]:
            return meant(f"--{whole[0]}.{option}")
        prefix, cls = having[0]
        return f" Its options begin with --{prefix}.{first}.{_of_class(option, cls, owners)}"
    if rest and first in owners:
        return _of_class(rest, owners[first], owners)
    if rest and first in FOLDERS:
        return f" No class has it; rlhf fit --{first}.help NAME lists the options of one."
    known, typed = [*FOLDERS, *owners, *_OWN], _IN_FULL.get(option, first)
    begun = [name for name in known if name.startswith(typed)][:1]
    return meant(*(begun or get_close_matches(typed, known, n=1, cutoff=0.8))) or " Try --help."


def _has(path: str, owners: Mapping[str, type]) -> bool:
    """Whether the class that was chosen has this option."""
    kind, _, rest = path.partition(".")
    return has_option(owners.get(kind), rest)


def _of_which(path: str, kind: str, *, prefix: str = "") -> str:
    """Which classes of a kind have an option, as a sentence; empty where none has."""
    having = [short for short, cls in choices(kind).items() if has_option(cls, path)]
    more = f" and {len(having) - 4} more" if len(having) > 4 else ""
    return f" {prefix}{path} is an option of --{kind} {', '.join(having[:4])}{more}." if having else ""


def _of_class(option: str, owner: type, owners: Mapping[str, type]) -> str:
    """What an unknown option of a class was meant to be, or else a list of those that it has."""
    first, _, rest = option.partition(".")
    if rest and (inner := option_classes(owner).get(first)):
        return _of_class(rest, inner, owners)
    if untyped := _untyped(first, owner):
        return untyped
    modules = [base.__module__ for base in owner.__mro__]
    kind = next((k for k, folder in FOLDERS.items() if any(m.startswith(folder) for m in modules)), "")
    here = known_elsewhere(f"{kind}.{option}" if kind else option, owner)
    if isinstance(here, str):
        return f" {for_model(here, owner, kind=kind)}"
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
