from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import CostLoss, sign_loss
from tests.unit.functional.cases import close
from tests.unit.functional.offline import batch_of, log_sigmoid, mask_of


def test_sign_by_hand() -> None:
    costs, safe = torch.tensor([2.0, -2.0, 2.0, -2.0]), torch.tensor([True, True, False, False])
    close(sign_loss(costs, safe), [-log_sigmoid(x) for x in (-2.0, 2.0, 2.0, -2.0)])


def test_by_hand() -> None:
    """Pair 0: a safe answer of cost -1 and an unsafe one of 2. Pair 1: both unsafe, in the wrong order."""
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1], [1, 1], [0, 0]], dtype=torch.bool)
    values = torch.tensor(
        [[9.0, -1.0], [2.0, math.nan], [math.inf, 1.5], [9.0, -0.5], [7.0, 7.0], [7.0, 7.0]]
    )
    safe = torch.tensor([True, False, False, False, True, True])
    rows = {"response_mask": mask, "safe": safe}
    counts = CostLoss().count(rows)
    assert counts.groups == 2  # the last pair lacks an answer
    pairs = -(log_sigmoid(3.0) + log_sigmoid(-2.0)) / 2
    signs = -(log_sigmoid(1.0) + log_sigmoid(2.0) + log_sigmoid(1.5) + log_sigmoid(-0.5)) / 2
    loss, metrics = CostLoss()({"values": values}, rows, counts)
    close(loss, pairs + signs)
    close(CostLoss(sign_coef=0.25)({"values": values}, rows, counts)[0], pairs + 0.25 * signs)
    wanted = {"accuracy": 0.5, "sign_accuracy": 0.75, "margin": 0.5, "chosen": 0.25, "rejected": 0.75}
    for name, value in wanted.items():
        close(metrics[f"cost_model/{name}"], value)


def test_signs_stand_for_verdicts() -> None:
    outputs, rows = batch_of(mask_of("right_padding"))
    counts = CostLoss().count(rows)
    signs = rows | {"safe": torch.where(rows["safe"], 1.0, -1.0)}
    assert torch.equal(CostLoss()(outputs, signs, counts)[0], CostLoss()(outputs, rows, counts)[0])


def test_harm_raises_the_cost() -> None:
    """Against a reward model's, the gradient pushes the chosen row down and the rejected one up."""
    values = torch.zeros(2, 1, requires_grad=True)
    rows = {"response_mask": torch.ones(2, 1, dtype=torch.bool), "safe": torch.tensor([True, False])}
    torch.autograd.backward(CostLoss()({"values": values}, rows, CostLoss().count(rows))[0])
    assert values.grad is not None
    close(values.grad, [[1.0], [-1.0]])  # a half by the pair, a half by the sign


def test_refusal() -> None:
    with pytest.raises(ValueError, match=r"sign_coef=-1\.0.*Try 1\.0"):
        CostLoss(sign_coef=-1.0)
