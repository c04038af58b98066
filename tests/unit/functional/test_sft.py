from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import Counts, SFTLoss
from tests.unit.functional.cases import close


def test_sft_loss_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    log_probs = torch.tensor([[math.log(0.5), math.log(0.25), math.nan], [-math.inf, math.nan, 0.0]])
    loss, metrics = SFTLoss()({"log_probs": log_probs}, {"response_mask": mask}, Counts.of(mask))
    close(loss, 1.5 * math.log(2))
    close(metrics["sft/nll"], 1.5 * math.log(2))
    close(metrics["sft/probability"], 0.375)
    summed, metrics = SFTLoss(aggregation="seq-mean-token-sum")(
        {"log_probs": log_probs}, {"response_mask": mask}, Counts.of(mask)
    )
    close(summed, 3 * math.log(2))
    constant = SFTLoss(aggregation="seq-mean-token-sum-norm", horizon=4)
    close(constant({"log_probs": log_probs}, {"response_mask": mask}, Counts.of(mask))[0], 0.75 * math.log(2))
    close(metrics["sft/nll"], 1.5 * math.log(2))


def test_weight_of_a_second_loss() -> None:
    mask = torch.tensor([[True, True]])
    log_probs = torch.tensor([[-1.0, -2.0]])
    loss, metrics = SFTLoss(coef=0.1)({"log_probs": log_probs}, {"response_mask": mask}, Counts.of(mask))
    close(loss, 0.15)
    close(metrics["sft/loss"], 0.15)
    close(metrics["sft/nll"], 1.5)
    assert set(metrics) == {"sft/loss", "sft/nll", "sft/probability"}


@pytest.mark.parametrize("coef", [-0.1, math.nan])
def test_right_tokens_are_not_made_unlikely(coef: float) -> None:
    with pytest.raises(ValueError, match=rf"SFTLoss\(coef={coef}\): must not be below 0\. Try 1\.0"):
        SFTLoss(coef=coef)


def test_a_horizon_that_is_missing_or_unread_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Set horizon .* for given answers to data\.max_response_tokens"):
        SFTLoss(aggregation="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match=r"^horizon=4 with aggregation='token-mean': nothing reads it"):
        SFTLoss(horizon=4)
