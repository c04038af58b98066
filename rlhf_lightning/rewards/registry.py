"""Reward functions by name: the short names that come with the package, and dotted paths to anybody's."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from rlhf_lightning.rewards.functions import exact_match, length, partial_match, reasoning_gym
from rlhf_lightning.rewards.maths import maths_answer

if TYPE_CHECKING:
    from rlhf_lightning.rewards.spec import RewardFunction

REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "partial_match": partial_match,
    "maths_answer": maths_answer,
    "reasoning_gym": reasoning_gym,
    "length": length,
}
"""The short names."""


def resolve(name: str) -> RewardFunction:
    """Return the reward function of a short name or a dotted path.

    Raises:
        ValueError: there is no such function.
    """
    if name in REWARDS:
        return REWARDS[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ValueError(_unknown(name, "it is no short name"))
    if not _exists(module_name):
        raise ValueError(_unknown(name, f"there is no module {module_name!r}"))
    try:
        module = import_module(module_name)
    except ImportError as err:
        raise ValueError(f"reward function {name!r}: {module_name} could not be imported ({err}).") from err
    if attribute not in vars(module):
        raise ValueError(_unknown(name, f"the module {module_name} defines no {attribute!r}"))
    function = vars(module)[attribute]
    if not callable(function):
        raise ValueError(
            f"reward function {name!r}: it is a {type(function).__name__}, which cannot be called."
        )
    return cast("RewardFunction", function)


def _exists(module_name: str) -> bool:
    try:
        return module_name in sys.modules or find_spec(module_name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def _unknown(name: str, why: str) -> str:
    return (
        f"reward function {name!r}: {why}. Short names: {', '.join(REWARDS)}. "
        "For your own function give its dotted path, such as mypackage.mymodule.myfunction."
    )
