"""The expected best score of k answers: pass@k, for scores of any kind.

Legend: G prompts, n answers to each.
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor


def expected_best(scores: Tensor, k: int) -> Tensor:
    """The mean, over all choices of k of the n answers to a prompt, of the best score among them.

    It has no bias as an estimate of the best of k new answers. Where scores are 0 and 1 it is pass@k (Chen
    2021, arXiv 2107.03374, eq. 1).

    Args:
        scores: [G, n].
        k: 1 to n.

    Returns:
        [G] float32.

    Raises:
        ValueError: k is not among 1 to n.
    """
    n = scores.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k={k} of {n} answers: choose from 1 to {n}.")
    # The i-th smallest is the best of the choices whose others are among the i smaller ones.
    chances = torch.tensor([comb(i, k - 1) / comb(n, k) for i in range(n)], dtype=torch.float64)
    ordered = scores.double().sort(dim=1).values
    return (ordered * chances.to(scores.device)).sum(dim=1).float()
