"""Advantages, losses and penalties against verl's: tests/parity/verl/write.py wrote what verl 0.9.1 gave."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch

from rlhf_lightning.functional import (
    Aggregation,
    CISPOLoss,
    Counts,
    GAEEstimator,
    GeometricPolicyLoss,
    GreedyEstimator,
    KLKind,
    Loss,
    OffPolicyCorrection,
    PolicyLoss,
    ReinforceLoss,
    ReturnEstimator,
    SequencePolicyLoss,
    ValueLoss,
    adapted_kl_coef,
    aggregate,
    group_advantages,
    kl_columns,
    kl_estimate,
    leave_one_out,
    masked_mean,
    masked_sum,
    optimal_baseline,
    penalized_rewards,
    spread,
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
    trained,
    valued,
)

REFERENCES = references.load("verl")
VALUES: dict[str, dict[str, references.Outputs]] = REFERENCES["values"]
KINDS: tuple[KLKind, ...] = ("k1", "k2", "k3")
MODES: tuple[Aggregation, ...] = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def grouped(batch: Batch, *, name: str, all_rows: bool = False) -> Found:
    """Compare within prompts; a group of one keeps its score, but in verl's vectorised RLOO.

    verl counts masked rows (`all_rows`). To count them for nothing, as here, it must not be given them.
    """
    outcomes, groups = masked_sum(batch["scores"], batch.mask, dim=1), torch.tensor(batch.groups)
    valid = None if all_rows else batch.mask.any(dim=1)
    if name.startswith("rloo"):
        single = "score" if name == "rloo" else "zero"
        found = leave_one_out(outcomes, groups, valid=valid, single=single)  # type: ignore[arg-type]
    elif name == "opo":
        found = optimal_baseline(outcomes, batch.mask.sum(dim=1), groups, valid=valid, single="score")
    else:
        scale = "none" if name == "dr_grpo" else "std"
        found = group_advantages(outcomes, groups, valid=valid, scale=scale, eps=1e-6, single="score")  # type: ignore[arg-type]
    return {"advantages": spread(found, batch.mask)}


def kl_in_reward(batch: Batch, *, kind: KLKind) -> Found:
    kl = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], kind, mask=batch.mask)
    current = float(masked_mean(kl_columns(kl, batch.mask)["row_kl"], batch.mask.any(dim=1)))
    coef = adapted_kl_coef(0.2, current=current, target=0.05, horizon=100, num_rows=len(batch.mask))
    return {
        "rewards": penalized_rewards(batch["scores"], kl, batch.mask, coef=0.2),
        "current": current,
        "coef": coef,
    }


def aggregated(batch: Batch, *, mode: Aggregation) -> Found:
    return {
        "loss": aggregate(batch["advantages"], batch.mask, mode, Counts.of(batch.mask), horizon=cases.HORIZON)
    }


def dual_clip(mode: Aggregation) -> PolicyLoss:
    horizon = cases.HORIZON if mode == "seq-mean-token-sum-norm" else 0
    return PolicyLoss(clip_high=0.28, dual_clip=1.5, aggregation=mode, horizon=horizon)


def terms(mode: Aggregation, kind: KLKind) -> PolicyLoss:
    return PolicyLoss(dual_clip=3.0, aggregation=mode, entropy_coef=0.01, kl_coef=0.1, kl_estimator=kind)


def all_rows_kl(batch: Batch, *, kind: KLKind) -> Found:
    """Take the mean divergence over all rows, masked ones adding 0, as verl does: 8.5e-3 to 0.46 away."""
    found = kl_in_reward(batch, kind=kind)
    current = float(found["current"]) * float(batch.mask.any(dim=1).float().mean())
    coef = adapted_kl_coef(0.2, current=current, target=0.05, horizon=100, num_rows=len(batch.mask))
    return found | {"current": current, "coef": coef}


def all_rows_gmpo(batch: Batch) -> Found:
    """Divide the loss by all rows, masked ones too, and count every token beyond the limits, as verl does.

    The clip decides nothing where the advantage pulls back: our share of clipped tokens is smaller.
    """
    found = trained(batch, loss=GeometricPolicyLoss(), advantages="row_advantages")
    share = batch.mask.any(dim=1).float().mean()
    beyond = (batch["log_probs"].float() - batch["old_log_probs"].float()).abs() > 0.4
    scaled: Found = {name: torch.as_tensor(found[name]) * share for name in ("loss", "gradient")}
    return scaled | {"clipped": beyond[batch.mask].float().mean()}


ONE_OF_THREE = ReturnEstimator(group_size=cases.GROUP_SIZE, single="score", credit="outcome")
GROUPED = ("grpo", "dr_grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo")
FORMULAS: Mapping[str, Formula] = {
    "gae": partial(estimated, estimator=GAEEstimator(gamma=0.97, lam=0.9), scores="rewards"),
    "gae_undiscounted": partial(estimated, estimator=GAEEstimator(), scores="rewards"),
    "gae_small": partial(shrunk, formula=partial(estimated, estimator=GAEEstimator(), scores="rewards")),
    "gae_after_kl": partial(estimated, estimator=GAEEstimator(kl_coef=0.2)),
    "kl_in_reward_k1": partial(kl_in_reward, kind="k1"),
    "kl_in_reward_k2": partial(kl_in_reward, kind="k2"),
    "kl_in_reward_k3": partial(kl_in_reward, kind="k3"),
    "reinforce_plus_plus": partial(returned, estimator=ReturnEstimator(gamma=0.9)),
    "reinforce_plus_plus_baseline": partial(estimated, estimator=ONE_OF_THREE, scores="even_scores"),
    "remax": partial(estimated, estimator=GreedyEstimator(form="verl"), scores="rewards"),
    **{name: partial(grouped, name=name) for name in GROUPED},
    "grpo_small": partial(shrunk, formula=partial(grouped, name="grpo")),
    **{f"{name}_of_all_rows": partial(grouped, name=name, all_rows=True) for name in GROUPED},
    "clip": partial(trained, loss=PolicyLoss()),
    **{f"dual_clip_{mode}": partial(trained, loss=dual_clip(mode)) for mode in MODES},
    **{f"halves_{mode}": partial(aggregated, mode=mode) for mode in MODES},
    "terms_low_var_kl": partial(trained, loss=terms("token-mean", "k3")),
    "terms_k1": partial(trained, loss=terms("seq-mean-token-mean", "k1")),
    "terms_k3+": partial(trained, loss=terms("seq-mean-token-sum", "k3+")),
    "gspo": partial(
        trained, loss=SequencePolicyLoss(clip_low=0.2, clip_high=0.3), advantages="row_advantages"
    ),
    "gspo_paper": partial(trained, loss=SequencePolicyLoss(), advantages="row_advantages"),
    "gmpo": partial(trained, loss=GeometricPolicyLoss(), advantages="row_advantages"),
    "cispo": partial(trained, loss=CISPOLoss()),
    "cispo_both_limits": partial(trained, loss=CISPOLoss(clip_low=0.3, clip_high=0.5)),
    "gpg": partial(trained, loss=ReinforceLoss()),
    "reinforce": partial(trained, loss=ReinforceLoss(aggregation="seq-mean-token-sum")),
    "bypass_reinforce": partial(trained, loss=CISPOLoss(clip_high=1.0)),
    "value": partial(valued, loss=ValueLoss()),
    "value_wide": partial(valued, loss=ValueLoss(clip=0.5)),
    "truncate_token": partial(corrected, correction=OffPolicyCorrection(high=1.5)),
    "truncate_sequence": partial(corrected, correction=OffPolicyCorrection(level="sequence", high=1.5)),
    "mask_token": partial(corrected, correction=OffPolicyCorrection(mode="mask", low=0.5, high=1.5)),
    "mask_sequence": partial(
        corrected, correction=OffPolicyCorrection(level="sequence", mode="mask", low=0.5, high=1.5)
    ),
}
EXCEPTIONS: Mapping[tuple[str, str], Formula] = {
    **{
        (f"kl_in_reward_{kind}", case): partial(all_rows_kl, kind=kind)
        for kind in KINDS
        for case in ("masked_row", "lone_token")
    },
    **{("gmpo", case): all_rows_gmpo for case in cases.MASKS},
}
"""Where verl does something else: what it does, in our terms."""
REFUSED = {
    "gae": "sum of the mask is one",
    "gae_undiscounted": "sum of the mask is one",
    "gae_small": "sum of the mask is one",
    "gae_after_kl": "sum of the mask is one",
    "reinforce_plus_plus": "sum of the mask is one",
    "reinforce_plus_plus_baseline": "sum of the mask is one",
    "mask_token": "division by zero",
    "mask_sequence": "division by zero",
}
"""What raises in verl on a batch of one token: whitening, and the metrics where no token keeps a weight."""
NOT_HERE = {
    "losses": {"clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro"},
    "advantages": {"gdpo", "gpg", "grpo_passk", "optimal_token_baseline", "tir_optimal_token_baseline"},
}
"""What verl has and this package has not. For the same reason these are not compared: its rejection of tokens
and rows by divergence, weights normalised over the batch, the estimate `abs`, the sum over tokens, and means
over rows of value losses."""


def test_references_are_of_these_batches() -> None:
    assert REFERENCES["inputs"] == pytest.approx(cases.checksum(), rel=1e-9)


def test_every_reference_is_compared() -> None:
    tables = {"kl", "extremes", "controller", "overlong", "equal_scores", "registered"}
    assert set(VALUES) == set(FORMULAS) | tables
    assert all(len(VALUES[formula]) == len(cases.MASKS) * len(cases.DTYPES) for formula in FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    agrees(name, VALUES[name], FORMULAS, EXCEPTIONS, may_raise=name in REFUSED)


@pytest.mark.parametrize(("name", "case"), EXCEPTIONS)
def test_exceptions_are_needed(name: str, case: str) -> None:
    assert far(FORMULAS[name], f"{case}/float32", VALUES[name][f"{case}/float32"]) > 1e-3


def test_one_token_is_refused_by_verl_alone() -> None:
    raised = {name: VALUES[name]["lone_token/float32"].get("raises", "") for name in FORMULAS}
    assert {name for name, message in raised.items() if message} == set(REFUSED)
    for name, message in REFUSED.items():
        assert message in raised[name]
        batch = cases.named("lone_token/float32")
        found = references.outputs(FORMULAS[name](batch.with_garbage()), batch)
        assert found.get("advantages", found.get("weights")) == [0.0]


def test_everything_registered_is_compared_or_listed() -> None:
    ours = {
        "losses": {"vanilla", "gspo", "geo_mean", "cispo", "gpg", "bypass_mode", "sapo"},  # that with TRL's
        "advantages": {
            *("gae", "grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "remax"),
            *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        },
    }
    registered = {kind: set(names) for kind, names in VALUES["registered"].items()}
    assert registered == {kind: ours[kind] | NOT_HERE[kind] for kind in ours}


@pytest.mark.parametrize("verls", ["kl", "k1", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+", "low_var_kl+"])
def test_kl_estimates(verls: str) -> None:
    kind = verls.replace("low_var_kl", "k3").replace("mse", "k2").replace("kl", "k1")
    leaf = torch.tensor(cases.LOG_RATIOS).requires_grad_()
    estimate = kl_estimate(leaf, torch.zeros_like(leaf), kind)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(estimate.sum(), leaf)
    found = {verls: references.plain(estimate), f"{verls} gradient": references.plain(gradient)}
    wanted = {name: VALUES["kl"]["float32"][name] for name in found}
    assert references.farthest(found, wanted) <= TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("name", "loss", "beyond"),
    [
        ("vanilla", PolicyLoss(dual_clip=3.0), 0),
        ("cispo", CISPOLoss(clip_low=0.2, clip_high=0.2), 0),
        # e^10 without a gradient where ours is e^20: verl limits a sequence's mean to 10, we a token to 20
        ("gspo", SequencePolicyLoss(clip_low=0.2, clip_high=0.2), 1),
        # e^25, without a limit, where ours is e^20
        ("geo_mean", GeometricPolicyLoss(clip_low=0.2, clip_high=0.2), 1),
    ],
)
def test_ratios_beyond_the_clamps(name: str, loss: Loss, beyond: int) -> None:
    wanted, compared = VALUES["extremes"][name], len(cases.LOG_RATIOS) - beyond
    for i, ratio in enumerate(cases.LOG_RATIOS):
        leaf = torch.tensor([[ratio - 30]], requires_grad=True)
        rows = {
            "log_probs": torch.tensor([[-30.0]]),
            "advantages": torch.tensor([[(-1.0) ** i]]),
            "response_mask": torch.ones(1, 1, dtype=torch.bool),
        }
        value, _ = loss({"log_probs": leaf, "entropy": torch.zeros(1, 1)}, rows, Counts(1, 1, 1))
        found = (value.item(), torch.autograd.grad(value, leaf)[0].item())
        distances = [
            references.distance(a, wanted[key][i]) for a, key in zip(found, ("loss", "gradient"), strict=True)
        ]
        assert (max(distances) <= TOLERANCE["float32"]) == (i < compared), (ratio, found)


def test_kl_controller() -> None:
    assert adapted_coefs() == pytest.approx(VALUES["controller"]["float64"]["coefs"], rel=1e-8)


def test_overlong_penalty() -> None:
    assert overlong_penalties() == pytest.approx(VALUES["overlong"]["float32"]["penalties"], abs=1e-7)


def test_equal_scores_are_exactly_zero_here() -> None:
    scores = torch.tensor(cases.EQUAL_SCORES)
    assert group_advantages(scores, torch.zeros(3, dtype=torch.long)).tolist() == [0.0, 0.0, 0.0]
    verls = VALUES["equal_scores"]["float32"]["advantages"]
    assert verls == pytest.approx([0.05555] * 3, abs=1e-4)  # 6e-8 of rounding over 7e-8 + 1e-6
