"""Rewards: weighted functions `(prompts, responses, rows) -> scores` or services, chosen by data source.

spec, registry      which functions score a row (`RewardSpec`); functions by short name, dotted path, address
score               scoring a batch, and trying functions out before any worker starts
functions, maths    the functions that the package has
verifiers           that of tasks of the reasoning-gym library
http                services
steps, environment  where steps of a response end; what answers an actor between its turns
"""

from rlhf_lightning.rewards.environment import Environment
from rlhf_lightning.rewards.http import RETRIES, SCHEMES, HTTPOptions, ServiceError, json_safe
from rlhf_lightning.rewards.registry import (
    REWARDS,
    Functions,
    Sources,
    function_names,
    resolve,
)
from rlhf_lightning.rewards.score import PREFLIGHT_RESPONSE, find, not_finite, preflight, score
from rlhf_lightning.rewards.spec import Kind, RewardFunction, RewardSpec
from rlhf_lightning.rewards.steps import step_ends

__all__ = [
    "PREFLIGHT_RESPONSE",
    "RETRIES",
    "REWARDS",
    "SCHEMES",
    "Environment",
    "Functions",
    "HTTPOptions",
    "Kind",
    "RewardFunction",
    "RewardSpec",
    "ServiceError",
    "Sources",
    "find",
    "function_names",
    "json_safe",
    "not_finite",
    "preflight",
    "resolve",
    "score",
    "step_ends",
]
