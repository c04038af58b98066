from __future__ import annotations

import math

import torch

from rlhf_lightning.functional import Counts, StepLoss
from tests.unit.functional.cases import close
from tests.unit.functional.offline import batch_of, log_sigmoid, mask_of


def test_by_hand() -> None:
    """Three labelled steps; a fourth place is marked outside the answer and does not count."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    steps = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    labels = torch.tensor([[math.nan, 1.0, 0.0, 1.0], [9.0, 0.75, 0.0, 0.0], [math.nan] * 4])
    values = torch.tensor([[9.0, 2.0, 1.0, 9.0], [math.inf, 1.0, 9.0, 9.0], [math.nan] * 4])
    rows = {"response_mask": mask, "step_mask": steps, "step_labels": labels}
    counts = StepLoss().count(rows)
    assert counts == Counts(tokens=3, sequences=2, groups=2)
    loss, metrics = StepLoss()({"values": values}, rows, counts)
    each = [-log_sigmoid(2.0), -log_sigmoid(-1.0), -0.75 * log_sigmoid(1.0) - 0.25 * log_sigmoid(-1.0)]
    close(loss, sum(each) / 3)
    close(metrics["process_reward/accuracy"], 2 / 3)  # the second step is wrong and was said to be right
    p = [math.exp(log_sigmoid(x)) for x in (2.0, -1.0)]
    close(metrics["process_reward/probability"], (p[0] + p[1] + 0.25 * p[1] + 0.75 * (1 - p[1])) / 3)


def test_one_half_is_not_right() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    labels, values = torch.tensor([[0.0, 0.0, 0.5]]), torch.tensor([[0.0, 0.0, -2.0]])
    rows = {"response_mask": mask, "step_mask": mask, "step_labels": labels}
    assert StepLoss()({"values": values}, rows, StepLoss().count(rows))[1]["process_reward/accuracy"] == 1


def test_only_labelled_steps_learn() -> None:
    outputs, rows = batch_of(mask_of("right_padding"))
    values = outputs["values"].requires_grad_()
    torch.autograd.backward(StepLoss()({"values": values}, rows, StepLoss().count(rows))[0])
    assert values.grad is not None
    steps = rows["step_mask"] & rows["response_mask"]
    assert torch.equal(values.grad != 0, steps)
    assert 0 < int(steps.sum()) < int(rows["response_mask"].sum())


def test_right_and_wrong_mirror_each_other() -> None:
    outputs, rows = batch_of(mask_of("gap_inside"))
    counts = StepLoss().count(rows)
    mirrored = rows | {"step_labels": 1 - rows["step_labels"]}
    first, second = (
        StepLoss()({"values": sign * outputs["values"]}, batch, counts)
        for sign, batch in ((1, rows), (-1, mirrored))
    )
    close(first[0], float(second[0]))
    close(first[1]["process_reward/probability"], float(second[1]["process_reward/probability"]))
