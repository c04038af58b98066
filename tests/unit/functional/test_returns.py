from __future__ import annotations

import torch

from rlhf_lightning.functional import discounted_returns, remax_advantages, remax_returns
from rlhf_lightning.functional.returns import ReturnGap
from tests.unit.functional.cases import close


def test_by_hand() -> None:
    rewards = torch.tensor([[1.0, torch.nan, 2.0, 4.0]])
    mask = torch.tensor([[True, False, True, True]])

    def found(gap: ReturnGap) -> torch.Tensor:
        return discounted_returns(rewards, mask, gamma=0.5, gap=gap)

    close(found("carry"), [[3.0, 0.0, 4.0, 4.0]])  # 2 + 0.5 * 4, 1 + 0.5 * 4
    close(found("zero"), [[2.0, 0.0, 4.0, 4.0]])  # 1 + 0.25 * 4
    close(found("forget"), [[1.0, 0.0, 4.0, 4.0]])


def test_remax_by_hand() -> None:
    mask = torch.tensor([[True, True, True, False]])
    penalties = torch.tensor([[0.1, 0.2, 0.3, torch.nan]])
    # the authors' loop discounts before it adds: gamma, gamma^2, gamma^3 from the end, no penalty to go
    found = remax_advantages(torch.tensor([2.0]), penalties, mask, gamma=0.5)
    close(found, [[0.25 - 0.1, 0.5 - 0.2, 1.0 - 0.3, 0.0]])
    clipped = remax_advantages(torch.tensor([-9.0]), penalties, mask, clip=5.0)
    close(clipped, [[-5.1, -5.2, -5.3, 0.0]])
    rewards = torch.tensor([[-0.1, -0.2, 2.7, torch.inf]])
    close(remax_returns(rewards, torch.tensor([1.0]), mask), [[1.4, 1.5, 1.7, 0.0]])


def test_no_rows() -> None:
    empty, mask = torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool)
    assert discounted_returns(empty, mask, gamma=1.0).shape == (0, 4)
    assert remax_advantages(torch.zeros(0), empty, mask).shape == (0, 4)
