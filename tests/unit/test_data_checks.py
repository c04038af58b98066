"""Columns that an algorithm and its data do not agree about, before any worker starts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import DPO, RewardModel
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import PreferenceData
from rlhf_lightning.functional import PairwiseLoss
from tests.unit.algos.short import refusal


class Measuring(RewardModel):
    """Which may make margins of its own, or read them."""

    def step(self, batch: Batch) -> Metrics:
        """As that of its base."""
        return super().step(batch)


def told(algorithm: RLHFAlgorithm, root: Path, *, margin_field: str | None) -> str:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "by": 1.5}] * 2
    data = PreferenceData.from_rows(rows, batch_size=2, margin_field=margin_field)
    return refusal(algorithm, root, data=data)


READS = PairwiseLoss(margin=True)


def test_margins_that_are_read_are_in_the_data(tmp_path: Path) -> None:
    assert told(RewardModel(loss=READS), tmp_path, margin_field="by") == "started"
    assert told(Measuring(loss=READS), tmp_path, margin_field=None) == "started"
    assert told(RewardModel(loss=READS), tmp_path, margin_field=None) == (
        "loss: reads the margins, by how much each chosen answer is better, and PreferenceData gives none. "
        "Type --data.margin_field FIELD, or --algo.loss.margin false."
    )


@pytest.mark.parametrize(
    ("algorithm", "margin_field", "said"),
    [
        (RewardModel(), "by", "RewardModel does not read the margins. Type --algo.loss.margin true."),
        (DPO(), "by", "DPO does not read the margins. Leave it out."),
        (RewardModel(), None, ""),
        (RewardModel(loss=READS), "by", ""),
        (Measuring(), "by", ""),
    ],
)
def test_margins_that_nothing_reads_are_said(
    algorithm: RLHFAlgorithm,
    margin_field: str | None,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert told(algorithm, tmp_path, margin_field=margin_field) == "started"
    found = [record.getMessage() for record in caplog.records if "margin" in record.getMessage()]
    assert found == ([f"data.margin_field: {said}"] if said else [])
