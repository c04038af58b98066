"""Rewards as plain functions `(prompts, responses, rows) -> scores`, named by data source, with weights."""

from rlhf_lightning.rewards.registry import REWARDS, resolve
from rlhf_lightning.rewards.score import preflight, score
from rlhf_lightning.rewards.spec import RewardFunction, RewardSpec

__all__ = ["REWARDS", "RewardFunction", "RewardSpec", "preflight", "resolve", "score"]
