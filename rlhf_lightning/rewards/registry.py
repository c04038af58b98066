"""Reward functions by name: short names of the package's own, dotted paths, addresses of services."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from rlhf_lightning.names import path_in_file
from rlhf_lightning.rewards.functions import (
    exact_match,
    length,
    partial_match,
    repetition,
    too_long,
)
from rlhf_lightning.rewards.http import SCHEMES, HTTPOptions, Service
from rlhf_lightning.rewards.maths import maths_answer
from rlhf_lightning.rewards.verifiers import reasoning_gym

if TYPE_CHECKING:
    from rlhf_lightning.rewards.spec import Kind, RewardFunction

    # Any, since the key type of a mapping is invariant, and mappings with str keys should pass, too.
    Weights: TypeAlias = Mapping[Any, float]
    Functions: TypeAlias = Weights | Sequence[str | RewardFunction] | str | RewardFunction | None
    Sources: TypeAlias = Mapping[str, Functions]
else:  # what the command line takes
    Functions = dict[str, float] | list[str] | str | None
    Sources = dict[str, dict[str, float] | list[str] | str]

REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "partial_match": partial_match,
    "maths_answer": maths_answer,
    "reasoning_gym": reasoning_gym,
    "length": length,
    "too_long": too_long,
    "repetition": repetition,
}
"""Functions by short name."""
_FOREIGN = (
    *("completions", "completion_ids"),  # TRL
    *("data_source", "solution_str", "ground_truth", "extra_info"),  # verl
    "queries",  # OpenRLHF: prompt and response as one text, before prompts and labels
)
"""Names of parameters of reward functions for other systems, which are called in other ways."""
_OTHERS = (
    f"Short names: {', '.join(REWARDS)}. A service has an address, such as http://127.0.0.1:8000/score. "
)


def resolve(name: str, *, kind: Kind = "reward", http: HTTPOptions | None = None) -> RewardFunction:
    """Return the function of a short name, of a dotted path, or of the address of a service.

    Args:
        name: as the user wrote it.
        kind: what messages call it.
        http: options for a service; None: the defaults.

    Raises:
        ValueError: there is no such function.
    """
    if name in REWARDS:
        return REWARDS[name]
    if name.startswith(SCHEMES):
        return Service(name, http or HTTPOptions())
    return cast("RewardFunction", imported(name, what=f"{kind} function {name!r}", others=_OTHERS))


def imported(name: str, *, what: str, others: str = "") -> Callable[..., object]:
    """Return the function of a dotted path.

    Args:
        name: as the user wrote it.
        what: it is, for messages.
        others: what else could have been written, for messages.

    Raises:
        ValueError: there is no such function.
    """
    if path := path_in_file(name, member="myfunction"):
        raise ValueError(f"{what}: it is a file. Give the dotted path of a function in it, such as {path}.")
    module_name, _, attribute = name.rpartition(".")
    advice = f"{others}For your own function give its dotted path, such as mypackage.mymodule.myfunction."
    if not module_name:
        wanted = "short name" if others else "dotted path"
        raise ValueError(f"{what}: it is not a {wanted}. {advice}")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as err:  # it is the user's, and anything may happen there
        if isinstance(err, ModuleNotFoundError) and f"{module_name}.".startswith(f"{err.name}."):
            raise ValueError(f"{what}: there is no module {module_name!r}. {advice}") from err
        raise ValueError(
            f"{what}: {module_name} could not be imported ({type(err).__name__}: {err})."
        ) from err
    if attribute not in vars(module):
        raise ValueError(f"{what}: the module {module_name} defines no {attribute!r}. {advice}")
    function = vars(module)[attribute]
    if not callable(function):
        raise ValueError(f"{what}: it is of type {type(function).__name__}, which cannot be called.")
    return cast("Callable[..., object]", function)


def check_parameters(function: Callable[..., object], *, what: str, returns: str = "scores") -> None:
    """Refuse a function that does not take three lists by position, or was written for another system.

    Args:
        function: as `resolve` returns it.
        what: it is, for messages.
        returns: what comes out, for messages.
    """
    try:
        parameters = inspect.signature(function)
    except ValueError:  # a built-in without a signature
        return
    try:
        given = parameters.bind([], [], []).arguments
    except TypeError:
        given = {}
    foreign = [name for name in given if name in _FOREIGN]
    if given and not foreign:
        return
    wrong = f"it takes {parameters}" + (f", where {foreign[0]!r} is another system's" if foreign else "")
    raise ValueError(
        f"{what}: {wrong}. It is called with three lists of one length, by position: (prompts, responses, "
        f"rows) -> {returns}, with prompts and responses as texts; a column of the data is "
        "row['answer'] of each of rows."
    )


def function_names(functions: Functions, *, option: str) -> dict[str, float] | list[str] | str | None:
    """Return the functions of a reward by the names by which workers find them.

    Raises:
        ValueError: workers cannot import a function, or one is neither a function nor a name.
    """
    if functions is None:
        return None
    if isinstance(functions, Mapping):
        return {function_name(function, option): weight for function, weight in functions.items()}
    if isinstance(functions, Sequence) and not isinstance(functions, str):
        return [function_name(function, option) for function in functions]
    return function_name(functions, option)


def function_weights(functions: Functions, *, option: str) -> dict[str, float]:
    """Return the weights of functions by their names; 1 where none is given.

    Raises:
        ValueError: as `function_names`; or a function is named twice.
    """
    named = function_names(functions, option=option)
    if isinstance(named, dict):
        return dict(named)
    listed = [named] if isinstance(named, str) else named or []
    if again := [name for name in listed if listed.count(name) > 1]:
        raise ValueError(
            f"{option}: {again[0]} is named {listed.count(again[0])} times. For a weight of its own type "
            f"{{{again[0]}: {float(listed.count(again[0]))}}}."
        )
    return dict.fromkeys(listed, 1.0)


def function_name(function: object, option: str) -> str:
    """The name by which workers find a function: its short name or dotted path; a name is returned as it is.

    Args:
        function: a function, or its name.
        option: the option that it was given for, for messages.

    Raises:
        ValueError: workers cannot import it.
    """
    in_script = isinstance(function, str) and function.startswith("__main__.")
    if isinstance(function, str) and not in_script:
        return function
    for short, known in REWARDS.items():
        if function is known:
            return short
    module = "__main__" if in_script else getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", "")
    found = sys.modules.get(module)
    if module != "__main__" and name and found is not None and vars(found).get(name) is function:
        return f"{module}.{name}"
    why = "in the script itself" if module == "__main__" else "not under its name at the top of a module"
    raise ValueError(
        f"{option}: {function!r} is {why}, so workers cannot import it. Write it with `def` in a "
        "module of its own, such as my_rewards.py beside the script, and import it from there; of one that a "
        "call makes give the path of the variable that holds it there, 'my_rewards.mine'."
    )
