"""Formulas against those of OpenRLHF: tests/parity/openrlhf/write.py wrote what OpenRLHF 0.11.2 gave."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch

from rlhf_lightning.functional import (
    Aggregation,
    Counts,
    DPOLoss,
    GAEEstimator,
    GroupEstimator,
    KLKind,
    OffPolicyCorrection,
    PairwiseLoss,
    PolicyLoss,
    ReturnEstimator,
    SequencePolicyLoss,
    SFTLoss,
    ValueLoss,
    aggregate,
    at_last_valid,
    clipped_policy_loss,
    discounted_returns,
    group_advantages,
    kl_estimate,
    leave_one_out,
    log_ratio,
    masked_mean,
    penalized_rewards,
    spread,
    whiten,
    zero_masked,
)
from tests.parity import cases, references
from tests.parity.cases import Batch
from tests.parity.references import Formula, Found, shrunk
from tests.unit.functional.parity import (
    TOLERANCE,
    adapted_coefs,
    agrees,
    corrected,
    estimated,
    far,
    overlong_penalties,
    returned,
    rows_of,
    trained,
    valued,
)

REFERENCES = references.load("openrlhf")
VALUES: dict[str, dict[str, references.Outputs]] = REFERENCES["values"]
SIZE = cases.GROUP_SIZE
GROUPS = torch.arange(len(cases.EVEN_SCORES)) // SIZE


def aggregated(batch: Batch, *, mode: Aggregation) -> Found:
    return {"loss": aggregate(batch["advantages"], batch.mask, mode, Counts.of(batch.mask))}


def all_rows(batch: Batch, *, name: str, kl_coef: float = 0.0) -> Found:
    """Compare the outcomes of all rows, masked ones too, then take off the divergence still to come.

    That is how OpenRLHF computes every estimator without a critic. Here masked rows count for nothing, and a
    penalty in GroupEstimator is part of the outcome, as in TRL.
    """
    outcomes = batch["even_outcomes"]
    if name == "rloo":
        compared = leave_one_out(outcomes, GROUPS)
    else:
        scale = "std" if name == "group_norm" else "none"
        compared = group_advantages(outcomes, GROUPS, scale=scale, eps=1e-9)  # type: ignore[arg-type]
    kl = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], mask=batch.mask)
    rewards = penalized_rewards(at_last_valid(compared, batch.mask), kl, batch.mask, coef=kl_coef)
    found = discounted_returns(rewards, batch.mask, gamma=1.0, gap="zero")
    if name == "reinforce_baseline":
        found = whiten(found, batch.mask, unbiased=False)
    return {"advantages": found}


def held_variance(batch: Batch) -> Found:
    """Divide by the root of the variance, of 1e-8 at least: here that is added, 1% of small numbers."""
    found = gae_of(1.0, whiten=False)(rows_of(batch.shrunk()))
    mask, raw = batch.mask, found["advantages"]
    scale = raw[mask].var(unbiased=False).clamp(min=1e-8).rsqrt()
    return {"advantages": (raw - masked_mean(raw, mask)) * scale, "returns": found["returns"]}


def all_rows_mean(batch: Batch) -> Found:
    """FlashREINFORCE takes off the mean outcome of all rows, masked ones too."""
    outcomes = batch["outcomes"].float()
    return {"advantages": spread(outcomes - outcomes.mean(), batch.mask)}


def geometric_gate(batch: Batch) -> Found:
    """Drop rows whose geometric mean of ratios is beyond the limits; others keep a weight for each token.

    Here a row has one weight, the product of its ratios, and that is what the limits hold.
    """
    mask, leaf = batch.mask, batch["log_probs"].clone().requires_grad_()
    names = ("old_log_probs", "rollout_log_probs", "advantages")
    old, rollout, advantages = (zero_masked(batch[name], mask) for name in names)
    mean = masked_mean(log_ratio(old, rollout), mask, dim=1).exp()
    weights = torch.where(((mean >= 0.5) & (mean <= 1.5))[:, None], log_ratio(old, rollout).exp(), 0.0)
    surrogate, clipped = clipped_policy_loss(zero_masked(leaf, mask), old, advantages)
    loss = aggregate(surrogate * weights, mask, "token-mean", Counts.of(mask))
    gradient = torch.autograd.grad(loss, leaf)[0]
    return {"loss": loss, "gradient": gradient, "clipped": masked_mean(clipped, mask)}


def no_number(batch: Batch) -> Found:
    """Divide by the number of pairs, which is 0: where both rows must have tokens, none is left."""
    return {"loss": torch.nan, "gradient": torch.zeros(batch.mask.shape)}


def returns_of(gamma: float = 1.0, *, group_size: int = 1, kl_coef: float = 0.0) -> ReturnEstimator:
    return ReturnEstimator(gamma=gamma, gap="zero", unbiased=False, group_size=group_size, kl_coef=kl_coef)


def gae_of(
    gamma: float, *, kl_coef: float = 0.0, clip: float | None = None, whiten: bool = True
) -> GAEEstimator:
    return GAEEstimator(
        gamma=gamma, lam=0.9, gap="zero", unbiased=False, kl_coef=kl_coef, score_clip=clip, whiten=whiten
    )


def terms(kind: str) -> PolicyLoss:
    return PolicyLoss(entropy_coef=0.01, kl_coef=0.1, kl_estimator=kind)  # type: ignore[arg-type]


def rloo(kl_coef: float = 0.0) -> GroupEstimator:
    return GroupEstimator(group_size=SIZE, baseline="leave_one_out", scale="none", kl_coef=kl_coef)


def groups_of(estimator: GroupEstimator | ReturnEstimator) -> Formula:
    return partial(estimated, estimator=estimator, scores="even_scores")


FORMULAS: Mapping[str, Formula] = {
    "gae": partial(estimated, estimator=gae_of(0.97)),
    "gae_kl": partial(estimated, estimator=gae_of(0.97, kl_coef=0.2)),
    "gae_small": partial(shrunk, formula=partial(estimated, estimator=gae_of(1.0))),
    "gae_clipped": partial(estimated, estimator=gae_of(1.0, kl_coef=0.2, clip=0.5)),
    "reinforce": partial(returned, estimator=returns_of(0.9), scores="scores"),
    "reinforce_kl": partial(returned, estimator=returns_of(0.9, kl_coef=0.2), scores="scores"),
    "flash_reinforce": partial(estimated, estimator=GroupEstimator(group_size=len(GROUPS), scale="none")),
    "reinforce_baseline": groups_of(returns_of(group_size=SIZE)),
    "reinforce_baseline_kl": groups_of(returns_of(group_size=SIZE, kl_coef=0.2)),
    "rloo": groups_of(rloo()),
    "rloo_kl": groups_of(rloo(0.2)),
    "group_norm": groups_of(GroupEstimator(group_size=SIZE, eps=1e-9)),
    "group_norm_small": partial(shrunk, formula=groups_of(GroupEstimator(group_size=SIZE, eps=1e-9))),
    "group_norm_kl": groups_of(GroupEstimator(group_size=SIZE, eps=1e-9, kl_coef=0.2)),
    "dr_grpo": groups_of(GroupEstimator(group_size=SIZE, scale="none")),
    "dr_grpo_kl": groups_of(ReturnEstimator(gap="zero", group_size=SIZE, whiten=False, kl_coef=0.2)),
    "clip": partial(trained, loss=PolicyLoss()),
    "clip_by_sample": partial(trained, loss=PolicyLoss(clip_high=0.28, aggregation="seq-mean-token-mean")),
    "dual_clip": partial(trained, loss=PolicyLoss(clip_high=0.28, dual_clip=1.5)),
    "gspo": partial(
        trained, loss=SequencePolicyLoss(clip_low=0.2, clip_high=0.3), advantages="row_advantages"
    ),
    "gspo_of_rollout": partial(
        trained,
        loss=SequencePolicyLoss(clip_low=0.2, clip_high=0.3),
        advantages="row_advantages",
        old="rollout_log_probs",
    ),
    "clip_token": partial(corrected, correction=OffPolicyCorrection(low=0.5, high=1.5)),
    "mask_token": partial(corrected, correction=OffPolicyCorrection(mode="mask", low=0.5, high=1.5)),
    "mask_seq": partial(
        corrected, correction=OffPolicyCorrection(level="sequence", mode="mask", low=0.5, high=1.5)
    ),
    "terms_k1": partial(trained, loss=terms("k1")),
    "terms_k2": partial(trained, loss=terms("k2")),
    "terms_k3": partial(trained, loss=terms("k3")),
    "terms_k1_unbiased": partial(trained, loss=terms("k1+")),
    "terms_k3_unbiased": partial(trained, loss=terms("k3+")),
    "halves_by_token": partial(aggregated, mode="token-mean"),
    "halves_by_sample": partial(aggregated, mode="seq-mean-token-mean"),
    "value": partial(valued, loss=ValueLoss()),
    "value_unclipped": partial(valued, loss=ValueLoss(clip=None)),
    "sft": partial(trained, loss=SFTLoss()),
    "sft_by_sample": partial(trained, loss=SFTLoss(aggregation="seq-mean-token-mean")),
    "dpo": partial(trained, loss=DPOLoss(beta=0.3)),
    "dpo_smoothed": partial(trained, loss=DPOLoss(beta=0.3, label_smoothing=0.1)),
    "ipo": partial(trained, loss=DPOLoss(kind="ipo", beta=0.5, length_average=False)),
    "pairwise": partial(valued, loss=PairwiseLoss()),
    "pairwise_margins": partial(valued, loss=PairwiseLoss(margin=True)),
    "pairwise_log_exp": partial(valued, loss=PairwiseLoss()),
}
PAIRS = ("dpo", "dpo_smoothed", "ipo", "pairwise", "pairwise_margins", "pairwise_log_exp")
WITHOUT_ROWS = ("masked_row", "lone_token")
EXCEPTIONS: Mapping[tuple[str, str], Formula] = {
    **{
        (f"{name}{suffix}", case): partial(all_rows, name=name, kl_coef=kl_coef)
        for name in ("reinforce_baseline", "dr_grpo", "rloo", "group_norm")
        for suffix, kl_coef in {"": 0.0, "_kl": 0.2}.items()
        for case in cases.MASKS
        if case == "masked_row" or (suffix and name in ("rloo", "group_norm"))
    },
    ("group_norm_small", "masked_row"): partial(shrunk, formula=partial(all_rows, name="group_norm")),
    **{("gae_small", case): held_variance for case in cases.MASKS if case != "lone_token"},
    **{("flash_reinforce", case): all_rows_mean for case in WITHOUT_ROWS},
    **{("mask_seq", case): geometric_gate for case in ("right_padding", "gap_inside", "masked_row")},
    **{(name, "lone_token"): no_number for name in PAIRS},
}
"""Where OpenRLHF does something else: what it does, in our terms."""


def test_references_are_of_these_batches() -> None:
    assert REFERENCES["inputs"] == pytest.approx(cases.checksum(), rel=1e-9)


def test_every_reference_is_compared() -> None:
    assert set(VALUES) == set(FORMULAS) | {"kl", "controller", "overlong", "equal_scores", "group_of_one"}
    assert all(len(VALUES[formula]) == len(cases.MASKS) * len(cases.DTYPES) for formula in FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    agrees(name, VALUES[name], FORMULAS, EXCEPTIONS)


@pytest.mark.parametrize(("name", "case"), EXCEPTIONS)
def test_exceptions_are_needed(name: str, case: str) -> None:
    assert far(FORMULAS[name], f"{case}/float32", VALUES[name][f"{case}/float32"]) > 1e-3


@pytest.mark.parametrize(
    ("kind", "limit"), [("k1", 10.0), ("k2", 10.0), ("k3", None), ("k1+", 10.0), ("k3+", None)]
)
def test_kl_estimates(kind: KLKind, limit: float | None) -> None:
    """OpenRLHF limits k1 and k2 to +-10 too, where they then have no gradient; here only k3 is limited."""
    leaf = torch.tensor(cases.LOG_RATIOS).requires_grad_()
    estimate = kl_estimate(leaf, torch.zeros_like(leaf), kind)
    held = estimate if limit is None else estimate.clamp(-limit, limit)
    (gradient,) = torch.autograd.grad((estimate if kind.endswith("+") else held).sum(), leaf)
    found = {kind: references.plain(held), f"{kind} gradient": references.plain(gradient)}
    wanted = {name: VALUES["kl"]["float32"][name] for name in found}
    assert references.farthest(found, wanted) <= TOLERANCE["float32"]
    assert torch.equal(estimate, held) == (limit is None)


def test_kl_controller() -> None:
    assert adapted_coefs() == pytest.approx(VALUES["controller"]["float64"]["coefs"], rel=1e-8)


def test_overlong_penalty() -> None:
    assert overlong_penalties() == pytest.approx(VALUES["overlong"]["float32"]["penalties"], abs=1e-7)


def test_equal_scores_are_exactly_zero_here() -> None:
    scores = torch.tensor(cases.EQUAL_SCORES)
    assert group_advantages(scores, torch.zeros(3, dtype=torch.long), eps=1e-9).tolist() == [0.0, 0.0, 0.0]
    theirs = VALUES["equal_scores"]["float32"]["advantages"]
    assert theirs == pytest.approx([0.80546] * 3, abs=1e-4)  # 6e-8 of rounding over 7.3e-8 + 1e-9


def test_a_group_of_one_is_zero_here() -> None:
    theirs = {name: each["advantages"] for name, each in VALUES["group_of_one"].items()}
    assert theirs == {"rloo": [None], "group_norm": [None], "dr_grpo": [0.0], "reinforce_baseline": [0.0]}
    score, group = torch.tensor([0.75]), torch.tensor([0])
    assert leave_one_out(score, group).tolist() == group_advantages(score, group).tolist() == [0.0]
