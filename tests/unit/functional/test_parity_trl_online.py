"""GRPO and RLOO against TRL's trainers: tests/parity/trl_online/write.py wrote what TRL 1.16 gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch

from rlhf_lightning.functional import (
    CISPOLoss,
    GroupEstimator,
    OffPolicyCorrection,
    PolicyLoss,
    SAPOLoss,
    SequencePolicyLoss,
    group_advantages,
)
from tests.parity import cases, references
from tests.parity.cases import Batch
from tests.parity.references import Formula, Found, shrunk
from tests.unit.functional.parity import agrees, corrected, estimated, far, trained

REFERENCES = references.load("trl_online")
VALUES: dict[str, dict[str, references.Outputs]] = REFERENCES["values"]
GRPO = GroupEstimator(group_size=cases.GROUP_SIZE, eps=1e-4)
UNSCALED = GroupEstimator(group_size=cases.GROUP_SIZE, scale="none")
BY_ROW = PolicyLoss(aggregation="seq-mean-token-mean")
DR_GRPO = PolicyLoss(aggregation="seq-mean-token-sum-norm", horizon=cases.HORIZON)
TERMS = PolicyLoss(kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01)
GSPO = SequencePolicyLoss(clip_low=0.2, clip_high=0.3)
LUSPO = SequencePolicyLoss(clip_low=0.2, clip_high=0.3, aggregation="seq-mean-token-sum")


def rloo(kl_coef: float = 0.0) -> Formula:
    estimator = GroupEstimator(
        group_size=cases.GROUP_SIZE, baseline="leave_one_out", scale="none", kl_coef=kl_coef
    )
    return partial(estimated, estimator=estimator, scores="even_scores")


def on_policy(batch: Batch) -> Found:
    """The gradient at a ratio of 1: TRL clips a response's ratio, the product of its tokens' ratios."""
    loss = PolicyLoss(aggregation="seq-mean-token-sum")
    return {"gradient": trained(batch, loss=loss, advantages="row_advantages", old="log_probs")["gradient"]}


def weighed(level: str, mode: str) -> Formula:
    correction = OffPolicyCorrection(level=level, mode=mode, low=0.5, high=1.5)  # type: ignore[arg-type]
    return partial(corrected, correction=correction)


def of_all_rows(batch: Batch, *, formula: Formula) -> Found:
    """TRL's means over rows have masked ones among them, which add 0."""
    share = batch.mask.any(dim=1).float().mean()
    return {name: torch.as_tensor(x) * share for name, x in formula(batch).items()}


FORMULAS: Mapping[str, Formula] = {
    "grpo_advantages": partial(estimated, estimator=GRPO, scores="even_scores"),
    "grpo_advantages_small": partial(
        shrunk, formula=partial(estimated, estimator=GRPO, scores="even_scores")
    ),
    "unscaled_advantages": partial(estimated, estimator=UNSCALED, scores="even_scores"),
    "rloo_advantages": rloo(),
    "rloo_advantages_kl": rloo(0.1),
    "rloo_on_policy": on_policy,
    "loss_grpo": partial(trained, loss=BY_ROW),
    "loss_bnpo": partial(trained, loss=PolicyLoss()),
    "loss_dr_grpo": partial(trained, loss=DR_GRPO),
    "loss_dapo": partial(trained, loss=PolicyLoss(clip_high=0.28)),
    "loss_two_sided": partial(trained, loss=PolicyLoss(dual_clip=1.5)),
    "loss_cispo": partial(trained, loss=CISPOLoss(absolute_high=True, clip_high=1.5)),
    "loss_sapo": partial(trained, loss=SAPOLoss()),
    "loss_gspo": partial(trained, loss=GSPO, advantages="row_advantages"),
    "loss_luspo": partial(trained, loss=LUSPO, advantages="row_advantages"),
    "loss_terms": partial(trained, loss=TERMS),
    "loss_terms_corrected": partial(trained, loss=replace(TERMS, kl_weighted=True)),
    "corrected_token_truncate": weighed("token", "truncate"),
    "corrected_token_mask": weighed("token", "mask"),
    "corrected_sequence_truncate": weighed("sequence", "truncate"),
    "corrected_sequence_mask": weighed("sequence", "mask"),
}
EXCEPTIONS: Mapping[tuple[str, str], Formula] = {
    **{
        (name, case): partial(of_all_rows, formula=FORMULAS[name])
        for name in ("loss_grpo", "loss_dr_grpo", "loss_sapo", "loss_gspo", "loss_luspo")
        for case in ("masked_row", "lone_token")
    }
}
"""Where TRL does something else: what it does, in our terms.

Not here at all, and so not compared, is its loss VESPO, the mask of off-policy rows, the choice
of tokens by entropy, scores scaled by the whole batch or one by one, and of RLOO the scaled advantages and
the clip of a response's ratio.
"""


def test_references_are_of_these_batches() -> None:
    assert REFERENCES["inputs"] == pytest.approx(cases.checksum(), rel=1e-9)


def test_every_reference_is_compared() -> None:
    assert set(VALUES) == set(FORMULAS) | {"equal_scores"}


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    agrees(name, VALUES[name], FORMULAS, EXCEPTIONS)


@pytest.mark.parametrize(("name", "case"), EXCEPTIONS)
def test_exceptions_are_needed(name: str, case: str) -> None:
    assert far(FORMULAS[name], f"{case}/float32", VALUES[name][f"{case}/float32"]) > 1e-3


def test_equal_scores_are_exactly_zero_here() -> None:
    scores = torch.tensor(cases.EQUAL_SCORES)
    assert group_advantages(scores, torch.zeros(3, dtype=torch.long), eps=1e-4).tolist() == [0.0, 0.0, 0.0]
    theirs = VALUES["equal_scores"]["right_padding/float32"]["advantages"]
    assert theirs == pytest.approx([5.956e-4] * len(theirs), rel=1e-3)  # 6e-8 of rounding over 1e-4
