"""What is computed: one algorithm a file."""

if __name__ != "rlhf_lightning.algos":
    raise ImportError(f"This folder is imported as 'rlhf_lightning.algos', not as {__name__!r}.")

from rlhf_lightning.algos.cispo import CISPO
from rlhf_lightning.algos.cost_model import CostModel
from rlhf_lightning.algos.dapo import DAPO
from rlhf_lightning.algos.distillation import Distillation
from rlhf_lightning.algos.dpo import DPO
from rlhf_lightning.algos.gmpo import GMPO
from rlhf_lightning.algos.grpo import GRPO
from rlhf_lightning.algos.gspo import GSPO
from rlhf_lightning.algos.kto import KTO
from rlhf_lightning.algos.online_dpo import OnlineDPO
from rlhf_lightning.algos.opo import OPO
from rlhf_lightning.algos.ppo import PPO
from rlhf_lightning.algos.process_reward_model import ProcessRewardModel
from rlhf_lightning.algos.reinforce_pp import ReinforcePP
from rlhf_lightning.algos.remax import ReMax
from rlhf_lightning.algos.reward_model import RewardModel
from rlhf_lightning.algos.rloo import RLOO
from rlhf_lightning.algos.safe_rlhf import SafeRLHF
from rlhf_lightning.algos.sft import SFT
from rlhf_lightning.algos.simpo import SimPO

__all__ = [
    "CISPO",
    "DAPO",
    "DPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "KTO",
    "OPO",
    "PPO",
    "RLOO",
    "SFT",
    "CostModel",
    "Distillation",
    "OnlineDPO",
    "ProcessRewardModel",
    "ReMax",
    "ReinforcePP",
    "RewardModel",
    "SafeRLHF",
    "SimPO",
]
