"""Rewards: functions `(prompts, responses, rows) -> scores` or services, by data source, with weights."""

from rlhf_lightning.rewards.environment import Environment
from rlhf_lightning.rewards.http import RETRIES, SCHEMES, HTTPOptions, ServiceError, json_safe
from rlhf_lightning.rewards.registry import REWARDS, Functions, Sources, named, named_sources, resolve
from rlhf_lightning.rewards.score import PREFLIGHT_RESPONSE, preflight, score
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
    "json_safe",
    "named",
    "named_sources",
    "preflight",
    "resolve",
    "score",
    "step_ends",
]
