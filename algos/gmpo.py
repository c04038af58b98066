"""GMPO: the geometric mean of the tokens' clipped ratios (Zhao 2025)."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algos.grpo import GRPO
from rlhf_lightning.functional import GeometricPolicyLoss, PolicyLoss


class GMPO(GRPO):
    """Zhao 2025: GRPO with another loss."""

    policy_loss: PolicyLoss = field(default_factory=GeometricPolicyLoss)
    """The actor's loss."""
