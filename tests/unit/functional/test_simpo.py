from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import SimPOLoss
from tests.unit.functional.cases import close
from tests.unit.functional.offline import log_sigmoid


def test_by_hand() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]], dtype=torch.bool)
    log_probs = torch.tensor([[-1.0, -2.0], [-2.0, math.nan], [math.inf, -3.0], [-1.0, -1.0]])
    rows = {"response_mask": mask}
    counts = SimPOLoss().count(rows)
    assert (counts.groups, counts.tokens) == (2, 3)

    def loss(objective: SimPOLoss) -> float:
        return float(objective({"log_probs": log_probs}, rows, counts)[0])

    # means -1.5 against -2, and -3 against -1; times beta = 2, minus gamma = 0.5
    assert loss(SimPOLoss(gamma=0.5)) == pytest.approx(-(log_sigmoid(0.5) + log_sigmoid(-4.5)) / 2)
    assert loss(SimPOLoss(gamma=0.5, kind="hinge")) == pytest.approx((0.5 + 5.5) / 2)
    # sums -3 against -2, and -3 against -2
    assert loss(SimPOLoss(gamma=0.5, length_average=False)) == pytest.approx(-log_sigmoid(-2.5))
    assert loss(SimPOLoss(gamma=0.0, sft_coef=0.1)) == pytest.approx(
        -(log_sigmoid(1.0) + log_sigmoid(-4.0)) / 2 + 0.1 * 2.0
    )
    swapped = -(log_sigmoid(-0.5) + log_sigmoid(4.5)) / 2
    right = loss(SimPOLoss(gamma=0.5))
    assert loss(SimPOLoss(gamma=0.5, label_smoothing=0.2)) == pytest.approx(0.8 * right + 0.2 * swapped)
    _, metrics = SimPOLoss()({"log_probs": log_probs}, rows, counts)
    wanted = {"accuracy": 0.5, "margin": -1.5, "chosen_reward": -4.5, "rejected_reward": -3.0}
    for name, value in (wanted | {"chosen_log_prob": -2.25}).items():
        close(metrics[f"simpo/{name}"], value)
    assert "simpo/sft_loss" not in metrics


def test_lengths_do_not_count() -> None:
    """A repeated answer is worth as much as the answer; its sum is not."""
    log_probs = torch.full((2, 4), -1.0)
    short = {"response_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)}
    long = {"response_mask": torch.ones(2, 4, dtype=torch.bool)}
    for average in (True, False):
        objective = SimPOLoss(length_average=average)
        first, second = (objective({"log_probs": log_probs}, r, objective.count(r))[0] for r in (short, long))
        assert torch.equal(first, second) == average


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "ipo"}, r"kind='ipo'.*Try 'sigmoid' or 'hinge'"),
        ({"beta": 0.0}, r"beta=0\.0.*Try 2\.0"),
        ({"gamma": -0.5}, r"gamma=-0\.5.*Try 2\.0, 1\.0 and 0\.0"),
        ({"sft_coef": -0.5}, r"sft_coef=-0\.5"),
        ({"label_smoothing": 0.7}, r"label_smoothing=0\.7"),
        ({"label_smoothing": 0.1, "kind": "hinge"}, r"label_smoothing=0\.1 with kind='hinge'"),
    ],
)
def test_refusals(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimPOLoss(**fields)  # type: ignore[arg-type]
