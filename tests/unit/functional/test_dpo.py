from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import DPOLoss, PreferenceKind, preference_loss
from tests.unit.functional.cases import close
from tests.unit.functional.offline import batch_of, log_sigmoid, mask_of

H = torch.tensor([2.0, 0.0, -1.0])


def test_formulas_by_hand() -> None:
    close(preference_loss(H, beta=0.5), [math.log(1 + math.exp(-x)) for x in (1.0, 0.0, -0.5)])
    close(preference_loss(H, kind="hinge", beta=0.5), [0.0, 1.0, 1.5])
    close(preference_loss(H, kind="ipo", beta=0.5), [1.0, 1.0, 4.0])  # the target is 1 / (2 beta) = 1
    smoothed = [-0.8 * log_sigmoid(x) - 0.2 * log_sigmoid(-x) for x in (1.0, 0.0, -0.5)]
    close(preference_loss(H, beta=0.5, label_smoothing=0.2), smoothed)
    robust = [(-0.8 * log_sigmoid(x) + 0.2 * log_sigmoid(-x)) / 0.6 for x in (1.0, 0.0, -0.5)]
    close(preference_loss(H, kind="robust", beta=0.5, label_smoothing=0.2), robust)


def test_smoothing_swaps_labels() -> None:
    """A pair and the same pair swapped, weighted by how often each is right."""
    for beta in (0.1, 1.0):
        right, swapped = preference_loss(H, beta=beta), preference_loss(-H, beta=beta)
        close(preference_loss(H, beta=beta, label_smoothing=0.3), (0.7 * right + 0.3 * swapped).tolist())
        # under labels swapped with that probability the mean of the robust loss is that of clean labels
        robust = [preference_loss(x, kind="robust", beta=beta, label_smoothing=0.3) for x in (H, -H)]
        close(0.7 * robust[0] + 0.3 * robust[1], right.tolist())


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_a_policy_that_moved_nowhere(kind: PreferenceKind) -> None:
    outputs, rows = batch_of(mask_of("right_padding"))
    rows["ref_log_probs"] = outputs["log_probs"].clone()
    loss, metrics = DPOLoss(kind=kind, beta=0.25)(outputs, rows, DPOLoss().count(rows))
    close(loss, {"sigmoid": math.log(2), "hinge": 1.0, "ipo": 4.0}[kind])
    close(metrics["dpo/margin"], 0.0)
    assert metrics["dpo/accuracy"] == 0


def test_by_hand() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0]], dtype=torch.bool)
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, math.nan], [-9.0, 0.0], [math.inf, math.nan]])
    ref = torch.tensor([[-2.0, -2.5], [-2.0, math.inf], [-5.0, 0.0], [math.nan, 0.0]])
    rows = {"response_mask": mask, "ref_log_probs": ref}
    # one whole pair: log-ratios 1 + 0.5 and -1, so h = 2.5 in sums and 1.75 in means
    loss, metrics = DPOLoss(beta=0.2, sft_coef=0.1)(
        {"log_probs": log_probs}, rows, counts := DPOLoss().count(rows)
    )
    assert (counts.groups, counts.sequences, counts.tokens) == (1, 2, 2)
    close(loss, -log_sigmoid(0.5) + 0.1 * 1.5)
    wanted = {
        "loss": -log_sigmoid(0.5) + 0.15,
        "accuracy": 1.0,
        "margin": 0.5,
        "chosen_reward": 0.3,
        "rejected_reward": -0.2,
        "chosen_log_prob": -3.0,
        "sft_loss": 1.5,
    }
    assert {name.removeprefix("dpo/") for name in metrics} == wanted.keys()
    for name, value in wanted.items():
        close(metrics[f"dpo/{name}"], value)
    for kind, average, value in (
        ("ipo", None, (1.75 - 2.5) ** 2),
        ("ipo", False, (2.5 - 2.5) ** 2),
        ("hinge", None, 0.5),
        ("hinge", True, 0.65),
    ):
        other = DPOLoss(kind=kind, beta=0.2, length_average=average)  # type: ignore[arg-type]
        close(other({"log_probs": log_probs}, rows, counts)[0], value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "kto"}, r"kind='kto': unknown preference loss\. Try one of sigmoid, robust, ipo, hinge"),
        ({"beta": 0.0}, r"beta=0\.0.*Try 0\.1"),
        ({"sft_coef": -1.0}, r"sft_coef=-1\.0.*Try 0\.1 and 0\.0"),
        ({"label_smoothing": 0.5}, r"label_smoothing=0\.5: .*Try 0\.0 or 0\.1"),
        ({"label_smoothing": -0.1}, r"label_smoothing=-0\.1: .*Try 0\.0 or 0\.1"),
        ({"label_smoothing": 0.1, "kind": "ipo"}, r"label_smoothing=0\.1 with kind='ipo'.*kind to 'sigmoid'"),
    ],
)
def test_refusals(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPOLoss(**fields)  # type: ignore[arg-type]
