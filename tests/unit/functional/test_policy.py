from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from rlhf_lightning.algos.grpo import grpo_loss
from rlhf_lightning.functional import Counts, KLKind, OffPolicyCorrection, PolicyLoss, clipped_policy_loss
from tests.unit.functional.cases import close, mask_of, valid
from tests.unit.functional.rows import batch_of


def slow_policy(new: float, old: float, advantage: float, low: float, high: float) -> tuple[float, bool]:
    ratio = math.exp(min(max(new - old, -20), 20))
    free, held = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
    return max(free, held), held > free


def test_policy_loss_by_hand() -> None:
    old = torch.zeros(1, 5)
    new = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.1]]).log()
    advantages = torch.tensor([[2.0, 2.0, -2.0, -2.0, 1.0]])
    loss, clipped = clipped_policy_loss(new, old, advantages, clip_low=0.2, clip_high=0.3)
    # held back only where the ratio has already moved the way the advantage pulls
    close(loss, [[-2.6, -1.0, 3.0, 1.6, -1.1]])
    assert clipped.tolist() == [[True, False, False, True, False]]


def test_dual_clip_by_hand() -> None:
    new, advantages = torch.tensor([[8.0, 2.0, 8.0]]).log(), torch.tensor([[-1.0, -1.0, 1.0]])
    off, _ = clipped_policy_loss(new, torch.zeros(1, 3), advantages)
    on, clipped = clipped_policy_loss(new, torch.zeros(1, 3), advantages, dual_clip=3.0)
    close(off, [[8.0, 2.0, -1.2]])
    close(on, [[3.0, 2.0, -1.2]])
    assert clipped.tolist() == [[True, False, True]]


def test_log_ratio_is_limited() -> None:
    new = torch.tensor([[-500.0, 500.0]], requires_grad=True)
    loss, _ = clipped_policy_loss(new, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]))
    close(loss[0, 0], -math.exp(-20))
    assert loss[0, 1].item() == pytest.approx(math.exp(20), rel=1e-6)
    torch.autograd.backward(loss.sum())
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()


def test_policy_loss_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    outputs, rows = batch_of(mask, dtype)
    loss, metrics = PolicyLoss(clip_low=0.1, clip_high=0.3)(outputs, rows, Counts.of(mask))
    places = [(b, t) for b in range(len(mask)) for t in valid(mask, b)]
    new, old, advantages, entropy = (
        [float(x[place]) for place in places]
        for x in (outputs["log_probs"], rows["log_probs"], rows["advantages"], outputs["entropy"])
    )
    each = [slow_policy(n, o, a, 0.1, 0.3) for n, o, a in zip(new, old, advantages, strict=True)]
    ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
    count = max(len(places), 1)
    close(loss, sum(x for x, _ in each) / count)
    close(metrics["actor/loss"], float(loss))
    close(metrics["actor/policy_loss"], float(loss))
    close(metrics["actor/clip_fraction"], sum(c for _, c in each) / count)
    close(metrics["actor/ratio"], sum(ratios) / count)
    close(metrics["actor/entropy"], sum(entropy) / count)
    k3 = [min(ratio - 1 - math.log(ratio), 10) for ratio in ratios]
    close(metrics["actor/approx_kl"], sum(k3) / count)


def test_policy_loss_adds_kl_and_entropy() -> None:
    mask = torch.tensor([[True, True, False]])
    outputs, rows = batch_of(mask)
    rows["ref_log_probs"] = outputs["log_probs"] - 0.5
    counts = Counts.of(mask)
    plain, _ = PolicyLoss(track_entropy=False)(outputs, rows, counts)
    loss, metrics = PolicyLoss(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)(outputs, rows, counts)
    entropy = float(outputs["entropy"][0, :2].mean())
    close(loss, float(plain) + 0.1 * 0.125 - 0.01 * entropy)
    close(metrics["actor/kl_loss"], 0.125)
    close(metrics["actor/policy_loss"], float(plain))


def test_columns() -> None:
    assert PolicyLoss().columns == ("log_probs", "advantages")
    assert PolicyLoss(kl_coef=0.1).columns == ("log_probs", "advantages", "ref_log_probs")
    assert not PolicyLoss(track_entropy=False).needs_entropy
    assert PolicyLoss(track_entropy=False, entropy_coef=0.01).needs_entropy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 1.5}, r"clip_low=1\.5.*Try 0\.2"),
        ({"clip_high": -0.1}, r"clip_high=-0\.1.*Try 0\.2"),
        ({"dual_clip": 1.0}, r"dual_clip=1\.0.*Try 3\.0 or None"),
        ({"kl_estimator": "k3+"}, r"^PolicyLoss\(kl_estimator='k3\+'\): nothing reads it, since kl_"),
        ({"kl_coef": -0.001}, r"kl_coef=-0\.001\): a penalty is not negative\. Try 0\.001, or 0 for none\.$"),
        ({"kl_weighted": True}, r"^PolicyLoss\(kl_weighted=True\): .* 0\.001, or leave kl_weighted out\.$"),
    ],
)
def test_policy_loss_refuses(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**fields)  # type: ignore[arg-type]


def test_a_horizon_that_is_missing_or_unread_is_refused() -> None:
    with pytest.raises(ValueError, match="Set horizon"):
        PolicyLoss(aggregation="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match=r"^horizon=8 with aggregation='token-mean': nothing reads it, only"):
        PolicyLoss(horizon=8)
    with pytest.raises(ValueError, match=r"-mean': .* Take that aggregation, or leave horizon at 0\.$"):
        replace(grpo_loss(), horizon=-8)


@dataclass(frozen=True, kw_only=True)
class OnesOwn(PolicyLoss):
    """Has another estimate by default."""

    kl_estimator: KLKind = "k1+"


def test_the_edges_of_a_clip_are_taken() -> None:
    assert PolicyLoss(clip_low=1.0, clip_high=0.0).clip_low == 1
    assert PolicyLoss(clip_low=0.0).clip_low == 0


def test_defaults_that_nothing_reads_are_accepted() -> None:
    assert replace(grpo_loss(), kl_coef=0.0).columns == ("log_probs", "advantages")
    assert OnesOwn().kl_coef == 0
    with pytest.raises(ValueError, match=r"^OnesOwn\(kl_estimator='k3'\): nothing reads it"):
        OnesOwn(kl_estimator="k3")


def test_a_correction_reads_the_rollout() -> None:
    loss = PolicyLoss(kl_coef=0.1, correction=OffPolicyCorrection())
    assert loss.columns == ("log_probs", "advantages", "ref_log_probs", "rollout_log_probs")
