"""RLOO: REINFORCE with the mean of the other answers as the baseline (Kool 2019; Ahmadian 2024)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from rlhf_lightning.algos.grpo import GRPO
from rlhf_lightning.functional import Baseline, PolicyLoss


class RLOO(GRPO):
    """Ahmadian 2024 section 2.3: GRPO with an answer left out of its baseline, and the KL in the score."""

    baseline: Baseline = "leave_one_out"
    """What an answer's score is compared with."""
    scale: Literal["std", "none"] = "none"
    """Divide a group's advantages by its standard deviation, or leave them."""
    reward_kl_coef: float = 0.05
    """Weight of an answer's divergence from the reference in its score."""
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    """The actor's loss."""
