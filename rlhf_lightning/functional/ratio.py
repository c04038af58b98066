"""Log-ratios of two policies' probabilities, limited so that their exponential is finite."""

from __future__ import annotations

from torch import Tensor

from rlhf_lightning.functional.masked import widened

MAX_LOG_RATIO = 20.0
"""Largest size of a log-ratio that is exponentiated, so that one odd token cannot overflow (verl)."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return r = log_probs - old_log_probs, limited to +-20 so that exp(r) stays finite."""
    return (widened(log_probs) - widened(old_log_probs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
