"""What a rollout looked like, as numbers to log."""

from __future__ import annotations

from torch import Tensor


def rollout_metrics(scores: Tensor, mask: Tensor) -> dict[str, float]:
    """Describe the responses of an iteration.

    Args:
        scores: [B, R] float32 token-level scores.
        mask: [B, R] bool.

    Returns:
        reward/{mean,std,min,max} of the rows' summed scores; response/{tokens,length_mean,length_max,
        truncated}, the last the share of rows that fill all R positions.
    """
    totals = scores.float().sum(dim=1)
    lengths = mask.sum(dim=1).float()
    return {
        "reward/mean": float(totals.mean()),
        "reward/std": float(totals.std(unbiased=False)),
        "reward/min": float(totals.min()),
        "reward/max": float(totals.max()),
        "response/tokens": float(lengths.sum()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float((lengths == mask.shape[1]).float().mean()),
    }
