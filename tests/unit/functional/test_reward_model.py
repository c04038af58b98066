from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import PairwiseLoss, pairwise_loss
from tests.unit.functional.cases import close, noise
from tests.unit.functional.offline import log_sigmoid

VALUES = torch.tensor([[9.0, 2.0, math.nan], [0.5, math.inf, 9.0], [1.0, 1.0, 1.0], [9.0, 9.0, 3.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)


def test_by_hand() -> None:
    """The number at the last valid token decides: 2 against 0.5, and 1 against 3."""
    rows = {"response_mask": MASK, "margins": torch.tensor([0.5, 99.0, 1.0, 99.0])}
    counts = PairwiseLoss().count(rows)
    loss, metrics = PairwiseLoss()({"values": VALUES}, rows, counts)
    close(loss, -(log_sigmoid(1.5) + log_sigmoid(-2.0)) / 2)
    for name, value in {"accuracy": 0.5, "margin": -0.25, "chosen": 1.5, "rejected": 1.75}.items():
        close(metrics[f"reward_model/{name}"], value)
    margins, _ = PairwiseLoss(margin=True)({"values": VALUES}, rows, counts)
    close(margins, -(log_sigmoid(1.0) + log_sigmoid(-3.0)) / 2)
    centred, _ = PairwiseLoss(centering=0.1)({"values": VALUES}, rows, counts)
    close(centred - loss, 0.1 * (2.5**2 + 4.0**2) / 2)


def test_a_pair_without_an_answer_does_not_count() -> None:
    mask = MASK.clone()
    mask[2] = False
    rows = {"response_mask": mask, "margins": torch.tensor([0.5, 0.5, math.nan, math.nan])}
    counts = PairwiseLoss().count(rows)
    assert counts.groups == 1
    close(PairwiseLoss(margin=True)({"values": VALUES}, rows, counts)[0], -log_sigmoid(1.0))


def test_formula_sees_differences_only() -> None:
    """Without centering a constant added to every score changes nothing; swapping mirrors the loss."""
    chosen, rejected = (noise(torch.ones(8, dtype=torch.bool), seed) for seed in (0, 1))
    plain = pairwise_loss(chosen, rejected)
    close(pairwise_loss(chosen + 1, rejected + 1), plain.tolist())
    close(
        pairwise_loss(rejected, chosen) - plain, (chosen - rejected).tolist()
    )  # softplus(x) - softplus(-x) = x
    assert not torch.allclose(pairwise_loss(chosen + 1, rejected + 1, centering=0.1), plain)


def test_refusal() -> None:
    with pytest.raises(ValueError, match=r"centering=-0\.1.*Try 0\.01"):
        PairwiseLoss(centering=-0.1)
