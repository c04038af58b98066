"""Roles: what each model of the dataflow is for. Methods are named as in HybridFlow's Table 4."""

from rlhf_lightning.workers.actor import Actor, drawing_apart
from rlhf_lightning.workers.ahead import Ahead, GenerationAhead, OtherActor, PartialGeneration
from rlhf_lightning.workers.asking import asking
from rlhf_lightning.workers.cost import Cost
from rlhf_lightning.workers.critic import Critic
from rlhf_lightning.workers.follower import Follower
from rlhf_lightning.workers.generator import GenerationInParts, Generator, SeparateGeneration
from rlhf_lightning.workers.joining import beside, joined, rows_together
from rlhf_lightning.workers.judge import Judge, reads_ids, whole_ids
from rlhf_lightning.workers.opponent import Opponent
from rlhf_lightning.workers.reading import ReadingActor
from rlhf_lightning.workers.reference import Reference
from rlhf_lightning.workers.reward import Reward
from rlhf_lightning.workers.role import Role
from rlhf_lightning.workers.scorer import Scorer
from rlhf_lightning.workers.settings import Settings
from rlhf_lightning.workers.tool import Tool

__all__ = [
    "Actor",
    "Ahead",
    "Cost",
    "Critic",
    "Follower",
    "GenerationAhead",
    "GenerationInParts",
    "Generator",
    "Judge",
    "Opponent",
    "OtherActor",
    "PartialGeneration",
    "ReadingActor",
    "Reference",
    "Reward",
    "Role",
    "Scorer",
    "SeparateGeneration",
    "Settings",
    "Tool",
    "asking",
    "beside",
    "drawing_apart",
    "joined",
    "reads_ids",
    "rows_together",
    "whole_ids",
]
