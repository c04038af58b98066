"""Returns without a critic: the discounted reward still to come, and ReMax's distance from the greedy answer.

Legend: B rows, R response width; everything is [B, R] float32 unless said otherwise, 0 where `mask` (bool) is
False. Inputs may hold anything there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import by_position, widened, zero_masked

ReturnGap = Literal["carry", "zero", "forget"]


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float, gap: ReturnGap = "carry") -> Tensor:
    """Reward still to come: G_t = r_t + gamma G', the prime at the next token; Sutton and Barto eq. 3.9.

    Args:
        rewards: [B, R] token-level rewards; what stands at a masked position is not counted.
        mask: [B, R] bool.
        gamma: discount per token.
        gap: at a masked position inside a response, `carry` G' over it, put a reward of `zero` there and keep
            discounting (OpenRLHF), or `forget` what follows it (verl before 0.9).

    Returns:
        [B, R].
    """
    reward_at, valid_at = by_position(zero_masked(rewards, mask)), by_position(mask)
    return_at = torch.zeros_like(reward_at)
    following = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        reward_to_go = reward_at[t] + gamma * following
        kept = {"carry": following, "zero": reward_to_go, "forget": torch.zeros_like(following)}[gap]
        following = torch.where(valid_at[t], reward_to_go, kept)
        return_at[t] = torch.where(valid_at[t], reward_to_go, 0.0)
    return by_position(return_at)


def remax_advantages(
    margins: Tensor, penalties: Tensor, mask: Tensor, *, gamma: float = 1.0, clip: float | None = None
) -> Tensor:
    """ReMax as its authors' code has it: clip(R - R_greedy, +-clip) gamma^(T - t) - beta kl_t of that token.

    Li 2023 (arXiv 2310.10505). T is the number of valid tokens and t counts them from 0, so the
    last one is discounted once.

    Args:
        margins: [B] outcome of the drawn answer minus that of the greedy one.
        penalties: [B, R] KL penalty of each token, coefficient included.
        mask: [B, R] bool.
        gamma: discount per token.
        clip: largest size of a margin, 5 in their code; None: no limit.

    Returns:
        [B, R].
    """
    margins = widened(margins) if clip is None else widened(margins).clamp(-clip, clip)
    left = mask.flip(1).cumsum(dim=1).flip(1)
    return zero_masked(margins[:, None] * gamma**left - zero_masked(penalties, mask), mask)


def remax_returns(rewards: Tensor, greedy: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """ReMax as verl has it: the reward to go, KL penalty included, minus the greedy answer's outcome.

    Args:
        rewards: [B, R] token-level rewards with their KL penalty.
        greedy: [B] outcome of the greedy answer.
        mask: [B, R] bool.
        gamma: discount per token; 1 in verl.

    Returns:
        [B, R].
    """
    return zero_masked(discounted_returns(rewards, mask, gamma=gamma) - widened(greedy)[:, None], mask)
