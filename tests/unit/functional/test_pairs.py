"""Pairs of which one answer has no token: they teach nothing, and count for nothing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import Counts, DPOLoss, PairwiseLoss, SimPOLoss, aggregate, in_whole_pairs
from rlhf_lightning.functional.cost_model import CostLoss
from rlhf_lightning.functional.pairs import PairLoss

LOSSES: dict[str, tuple[PairLoss, int]] = {
    "dpo": (DPOLoss(), 2),
    "dpo, likelihood": (DPOLoss(sft_coef=1.0), 2),
    "simpo": (SimPOLoss(), 2),
    "reward model": (PairwiseLoss(), 3),
    "cost model": (CostLoss(), 3),
}
"""With the tokens that it counts of a pair of two tokens and one."""


@pytest.mark.parametrize("name", LOSSES)
def test_halves_of_pairs_are_not_counted(name: str) -> None:
    loss, tokens = LOSSES[name]
    halves = torch.tensor([[1, 1], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0]], dtype=torch.bool)
    whole = torch.tensor([[1, 1], [0, 1]], dtype=torch.bool)
    assert loss.count({"response_mask": halves}) == Counts(0, 0, 0)
    both = loss.count({"response_mask": torch.cat([halves, whole])})
    assert both == Counts(tokens=tokens, sequences=2, groups=1)


class Likelihood(PairLoss):
    """Of both answers, as the docstring of its base has it."""

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask = in_whole_pairs(rows["response_mask"])
        return aggregate(-outputs["log_probs"], mask, "token-mean", counts), {}


def test_a_mean_over_tokens_is_one_of_whole_pairs() -> None:
    loss, mask = Likelihood(), torch.tensor([[1, 1], [0, 1], [1, 1], [0, 0]], dtype=torch.bool)
    assert in_whole_pairs(mask).tolist() == [[True, True], [False, True], [False, False], [False, False]]
    log_probs = -torch.tensor([[1.0, 2.0], [7.0, 3.0], [50.0, 50.0], [7.0, 7.0]])
    rows = {"response_mask": mask}
    assert loss({"log_probs": log_probs}, rows, loss.count(rows))[0] == 2
