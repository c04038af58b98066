from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import Counts, PolicyLoss, SAPOLoss
from tests.unit.functional.cases import close, mask_of
from tests.unit.functional.rows import batch_of, gradient, tokens


def gate(ratio: float, tau: float) -> float:
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def test_by_hand() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    outputs = {"log_probs": torch.tensor([[2.0, 2.0, 1.0]]).log()}
    rows = {"response_mask": mask, "log_probs": torch.zeros(1, 3)}
    rows["advantages"] = torch.tensor([[1.0, -1.0, -3.0]])
    loss = SAPOLoss(tau_pos=1.0, tau_neg=2.0, track_entropy=False)
    value, metrics = loss(outputs, rows, Counts.of(mask))
    # 4 sigmoid(1) = 2.9242343, 2 sigmoid(2) = 1.7615942, 2 sigmoid(0) = 1
    close(value, (-2.9242343 + 1.7615942 + 3.0) / 3)
    assert metrics["actor/clip_fraction"] == 0
    # -A e^r 4 p (1 - p): p = sigmoid(1) gives 0.7864477, sigmoid(2) 0.4199743, sigmoid(0) 1
    close(gradient(loss, outputs, rows), [[-2 * 0.7864477 / 3, 2 * 0.4199743 / 3, 1.0]])


def test_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    outputs, rows = batch_of(mask, dtype)
    columns = tokens(mask, outputs["log_probs"], rows["log_probs"], rows["advantages"])
    each = [
        [-a * gate(math.exp(min(max(n - o, -20), 20)), 1.0 if a > 0 else 1.05) for n, o, a in row]
        for row in columns
        if row
    ]
    value, _ = SAPOLoss()(outputs, rows, Counts.of(mask))
    close(value, sum(sum(row) / len(row) for row in each) / max(len(each), 1))


def test_the_policy_that_drew_learns_as_from_the_plain_ratio() -> None:
    mask = mask_of("gap_inside")
    outputs, rows = batch_of(mask)
    rows["log_probs"] = outputs["log_probs"].clone()
    plain = PolicyLoss(aggregation="seq-mean-token-mean")
    close(gradient(SAPOLoss(), outputs, rows), gradient(plain, outputs, rows).tolist())


def test_far_tokens_teach_nothing() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    rows = {"response_mask": mask, "log_probs": torch.zeros(1, 2), "advantages": torch.tensor([[1.0, -1.0]])}
    for far in (-500.0, 15.0, 500.0):
        found = gradient(SAPOLoss(track_entropy=False), {"log_probs": torch.full((1, 2), far)}, rows)
        close(found, [[0.0, 0.0]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tau_pos": 0.0}, r"tau_pos=0\.0.*above 0\. Try 1\.0 and 1\.05\.$"),
        ({"tau_neg": -1.0}, r"tau_neg=-1\.0.*above 0"),
        ({"clip_low": 0.3}, r"clip_low=0\.3, .* nothing is clipped\. Leave them out, or try PolicyLoss\.$"),
        ({"clip_high": 0.3}, r"clip_high=0\.3, .* nothing is clipped"),
        ({"dual_clip": 3.0}, r"dual_clip=3\.0\): .* nothing is clipped"),
    ],
)
def test_refusals(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SAPOLoss(**fields)  # type: ignore[arg-type]
