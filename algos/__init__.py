"""What is computed: one algorithm a file."""

if __name__ != "rlhf_lightning.algos":
    raise ImportError(f"This folder is imported as 'rlhf_lightning.algos', not as {__name__!r}.")

from rlhf_lightning.algos.grpo import GRPO
from rlhf_lightning.algos.ppo import PPO
from rlhf_lightning.algos.sft import SFT

__all__ = ["GRPO", "PPO", "SFT"]
