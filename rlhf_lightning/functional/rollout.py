"""Metrics of the responses of an iteration: scores and lengths."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from rlhf_lightning.functional.masked import masked_sum, row_ends

_TAKEN = ("mean", "std", "min", "max", "retries")
"""Last words of metrics of all functions together; a function of such a name is logged by its whole name."""


def row_totals(scores: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The score and the lengths of each response.

    Args:
        scores: [B, R] token-level scores.
        mask: [B, R] bool.

    Returns:
        `row_scores` [B] float32, `row_tokens` [B] int64, valid tokens, and `row_ends` [B] int64, tokens up to
        the last valid one, replies of an environment included.
    """
    return {
        "row_scores": masked_sum(scores, mask, dim=1),
        "row_tokens": mask.sum(dim=1),
        "row_ends": row_ends(mask),
    }


def rollout_metrics(row_scores: Tensor | None, row_tokens: Tensor, truncated: Tensor) -> dict[str, float]:
    """Describe the responses of an iteration by one score and one length each, as estimators return them.

    Args:
        row_scores: [B] float32, sum of the scores of each response; None where nothing has scored them.
        row_tokens: [B], valid tokens of each response.
        truncated: [B] bool, responses without an end.

    Returns:
        reward/{mean,std,min,max} of the scores; response/{tokens,length_mean,length_max,truncated}, the last
        a share.
    """
    lengths, rewards = row_tokens.float(), {}
    if row_scores is not None:
        scores = row_scores.float()
        rewards = {
            "reward/mean": float(scores.mean()),
            "reward/std": float(scores.std(unbiased=False)),
            "reward/min": float(scores.min()),
            "reward/max": float(scores.max()),
        }
    return rewards | {
        "response/tokens": float(lengths.sum()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(truncated.float().mean()),
    }


def part_metrics(names: Sequence[str], parts: Tensor) -> dict[str, float]:
    """Metrics of each of several reward functions over the responses of an iteration.

    Args:
        names: of the K functions; a dotted path or an address is logged by its last word if that is unique.
        parts: [B, K] float32, unweighted scores, NaN where a function does not score a response.

    Returns:
        reward/<name> and reward/<name>_std, mean and standard deviation of the responses that it scores;
        nothing where one function is all, or for one that scores none.
    """
    words = [re.split(r"[./]", name.rstrip("/"))[-1] for name in names]
    shown = [
        word if words.count(word) == 1 and word not in _TAKEN else name
        for word, name in zip(words, names, strict=True)
    ]
    found: dict[str, float] = {}
    for name, part in zip(shown, parts.T, strict=False):  # made-up rows of a traced step have other columns
        scored = part[~part.isnan()]
        if len(names) > 1 and len(scored):
            found[f"reward/{name}"] = float(scored.mean())
            found[f"reward/{name}_std"] = float(scored.std(unbiased=False))
    return found
