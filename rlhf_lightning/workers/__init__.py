"""Roles: what each model of the dataflow is for. Methods are named as in HybridFlow's Table 4."""

from rlhf_lightning.workers.actor import Actor
from rlhf_lightning.workers.critic import Critic
from rlhf_lightning.workers.reference import Reference
from rlhf_lightning.workers.reward import Reward
from rlhf_lightning.workers.role import Role, Settings

__all__ = ["Actor", "Critic", "Reference", "Reward", "Role", "Settings"]
