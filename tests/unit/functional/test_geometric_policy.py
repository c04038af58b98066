from __future__ import annotations

import math
import statistics

import pytest
import torch

from rlhf_lightning.functional import Counts, GeometricPolicyLoss
from tests.unit.functional.cases import close, mask_of
from tests.unit.functional.rows import batch_of, gradient, laid_out, one_advantage, tokens
from tests.unit.functional.slow import limited

LOW, HIGH = 0.4, 0.6


def slow_row(row: list[tuple[float, ...]]) -> tuple[float, list[float]]:
    """GMPO's objective of one response, negated, and its slope in each log-probability."""
    if not row:
        return 0.0, []
    advantage = row[0][2]
    sign = math.copysign(1.0, advantage)
    held = [sign * min(sign * (n - o), sign * limited(n - o, -LOW, HIGH)) for n, o, _ in row]
    loss = -advantage * math.exp(statistics.fmean(held))
    free = [h == n - o for h, (n, o, _) in zip(held, row, strict=True)]
    return loss, [loss / len(row) if f else 0.0 for f in free]


def test_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    outputs, rows = one_advantage(mask, dtype)
    columns = tokens(mask, outputs["log_probs"], rows["log_probs"], rows["advantages"])
    each, num = [slow_row(row) for row in columns], max(sum(map(bool, columns)), 1)
    loss = GeometricPolicyLoss(clip_low=LOW, clip_high=HIGH)
    value, metrics = loss(outputs, rows, Counts.of(mask))
    close(value, sum(x for x, _ in each) / num)
    clipped = sum(slope == 0 for _, slopes in each for slope in slopes)
    close(metrics["actor/clip_fraction"], clipped / max(int(mask.sum()), 1))
    if dtype == torch.float32:  # the gradient of a bfloat16 leaf is rounded
        close(
            gradient(loss, outputs, rows), laid_out(mask, [[g / num for g in slopes] for _, slopes in each])
        )


def test_by_hand() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    rows = {
        "response_mask": mask,
        "log_probs": torch.zeros(2, 2),
        "advantages": torch.tensor([[2.0, 2.0], [-1.0, -1.0]]),
    }
    outputs = {"log_probs": torch.tensor([[1.0, -1.0], [1.0, -1.0]])}
    value, metrics = GeometricPolicyLoss(track_entropy=False)(outputs, rows, Counts.of(mask))
    # A > 0 limits what rises, at 0.4: (0.4 - 1) / 2. A < 0 limits what falls, at -0.4: (1 - 0.4) / 2.
    close(value, (-2 * math.exp(-0.3) + math.exp(0.3)) / 2)
    close(metrics["actor/clip_fraction"], 0.5)


def test_a_response_has_the_mean_of_its_advantages() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    rows = {"response_mask": mask, "log_probs": torch.zeros(1, 2), "advantages": torch.tensor([[1.0, 2.0]])}
    value, _ = GeometricPolicyLoss(track_entropy=False)(
        {"log_probs": torch.zeros(1, 2)}, rows, Counts.of(mask)
    )
    close(value, -1.5)


def test_zero_advantages_teach_nothing() -> None:
    mask = mask_of("gap_inside")
    outputs, rows = batch_of(mask)
    rows["advantages"] = torch.zeros(mask.shape)
    assert torch.equal(gradient(GeometricPolicyLoss(), outputs, rows), torch.zeros(mask.shape))


def test_refusals() -> None:
    assert (GeometricPolicyLoss().clip_low, GeometricPolicyLoss().clip_high) == (0.4, 0.4)
    assert GeometricPolicyLoss(clip_low=1.5, clip_high=0.0).clip_low == 1.5  # log space has no limit at 1
    with pytest.raises(ValueError, match=r"clip_low=-0\.1.*Try 0\.4"):
        GeometricPolicyLoss(clip_low=-0.1)
    with pytest.raises(ValueError, match=r"clip_high=-0\.1.*Try 0\.4"):
        GeometricPolicyLoss(clip_high=-0.1)
    with pytest.raises(ValueError, match=r"dual_clip=3\.0.*no dual clip"):
        GeometricPolicyLoss(dual_clip=3.0)
