"""OPO: on-policy REINFORCE with the baseline of least variance, the length-weighted mean (Hao 2025)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from rlhf_lightning.algos.grpo import GRPO
from rlhf_lightning.functional import Baseline, PolicyLoss, ReinforceLoss


class OPO(GRPO):
    """Hao 2025: GRPO with another baseline, exactly on policy, without KL, clip or entropy."""

    baseline: Baseline = "length_weighted"
    """What an answer's score is compared with."""
    scale: Literal["std", "none"] = "none"
    """Divide a group's advantages by its standard deviation, or leave them."""
    policy_loss: PolicyLoss = field(default_factory=ReinforceLoss)
    """The actor's loss."""
