from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import (
    Counts,
    Loss,
    PolicyLoss,
    SFTLoss,
    ValueLoss,
    clipped_policy_loss,
    clipped_value_loss,
)
from tests.unit.functional.cases import close, mask_of, noise, valid

LOSSES: dict[str, Loss] = {
    "ppo": PolicyLoss(),
    "everything": PolicyLoss(
        clip_high=0.28, dual_clip=3.0, entropy_coef=0.01, kl_coef=0.1, aggregation="seq-mean-token-mean"
    ),
    "dr_grpo": PolicyLoss(aggregation="seq-mean-token-sum-norm", horizon=8, kl_coef=0.1, kl_estimator="k3+"),
    "value": ValueLoss(),
    "value_unclipped": ValueLoss(clip=None, coef=0.5),
    "sft": SFTLoss(),
    "sft_rows": SFTLoss(aggregation="seq-mean-token-sum"),
}


def batch_of(mask: Tensor, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and rows with garbage under the mask; ratios range from 0.1 to 10."""
    names = ("log_probs", "advantages", "ref_log_probs", "values", "returns")
    rows = {name: noise(mask, seed, dtype=dtype) for seed, name in enumerate(names)} | {"response_mask": mask}
    outputs = {
        name: noise(mask, 10 + seed, dtype=dtype)
        for seed, name in enumerate(("log_probs", "entropy", "values"))
    }
    return outputs, rows


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


def test_value_loss_by_hand() -> None:
    old, returns = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, -1.0, 1.0]])
    values = torch.tensor([[0.1, 0.5, 0.5, -0.5]])
    loss, clipped = clipped_value_loss(values, old, returns, clip=0.2)
    close(loss, [[0.405, 0.32, 1.125, 1.125]])  # 0.5 * (0.9^2, 0.8^2 held at 0.2, 1.5^2, 1.5^2)
    assert clipped.tolist() == [[False, True, False, False]]
    close(clipped_value_loss(values, old, returns, clip=None)[0], [[0.405, 0.125, 1.125, 1.125]])


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


def test_value_loss_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    outputs, rows = batch_of(mask, dtype)
    loss, metrics = ValueLoss(clip=0.3)(outputs, rows, Counts.of(mask))
    total = error = clips = 0.0
    count = max(int(mask.sum()), 1)
    for b in range(len(mask)):
        for t in valid(mask, b):
            v, old, target = (
                float(outputs["values"][b, t]),
                float(rows["values"][b, t]),
                float(rows["returns"][b, t]),
            )
            held = min(max(v, old - 0.3), old + 0.3)
            total += 0.5 * max((v - target) ** 2, (held - target) ** 2)
            error += (v - target) ** 2
            clips += (held - target) ** 2 > (v - target) ** 2
    close(loss, total / count)
    close(ValueLoss(clip=0.3, coef=0.5)(outputs, rows, Counts.of(mask))[0], 0.5 * total / count)
    close(metrics["critic/squared_error"], error / count)
    close(metrics["critic/clip_fraction"], clips / count)


def test_sft_loss_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    log_probs = torch.tensor([[math.log(0.5), math.log(0.25), math.nan], [-math.inf, math.nan, 0.0]])
    loss, metrics = SFTLoss()({"log_probs": log_probs}, {"response_mask": mask}, Counts.of(mask))
    close(loss, 1.5 * math.log(2))
    close(metrics["sft/nll"], 1.5 * math.log(2))
    close(metrics["sft/probability"], 0.375)
    summed, metrics = SFTLoss(aggregation="seq-mean-token-sum")(
        {"log_probs": log_probs}, {"response_mask": mask}, Counts.of(mask)
    )
    close(summed, 3 * math.log(2))
    close(metrics["sft/nll"], 1.5 * math.log(2))


def gradients(loss: Loss, mask: Tensor, size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of the outputs, and metrics, with the rows in micro-batches of `size`."""
    outputs, rows = batch_of(mask)
    leaves = {name: x.clone().requires_grad_() for name, x in outputs.items()}
    totals: dict[str, Tensor] = {}
    for start in range(0, len(mask), size):
        part = slice(start, start + size)
        value, metrics = loss(
            {name: x[part] for name, x in leaves.items()},
            {name: x[part] for name, x in rows.items()},
            Counts.of(mask),
        )
        torch.autograd.backward(value)
        totals = {name: totals.get(name, torch.zeros(())) + x for name, x in metrics.items()}
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()]
    return torch.stack(grads), totals


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_give_the_same_gradients(name: str, size: int, case: str) -> None:
    mask = mask_of(case)
    whole, metrics = gradients(LOSSES[name], mask, len(mask))
    parts, part_metrics = gradients(LOSSES[name], mask, size)
    assert torch.equal(parts, whole)  # each entry comes from one row: the same operations, bit for bit
    for key, value in metrics.items():
        close(part_metrics[key], float(value))  # sums of up to four parts
    assert torch.isfinite(whole).all()
    assert (whole[:, ~mask] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_contract(name: str) -> None:
    """It pickles, compares, reads only the columns that it names, and gives finished scalars."""
    loss = LOSSES[name]
    assert pickle.loads(pickle.dumps(loss)) == loss  # noqa: S301
    mask = mask_of("gap_inside")
    outputs, rows = batch_of(mask)
    rows = {key: rows[key] for key in (*loss.columns, "response_mask")}
    if not loss.needs_entropy:
        del outputs["entropy"]
    value, metrics = loss({key: x.requires_grad_() for key, x in outputs.items()}, rows, Counts.of(mask))
    assert value.shape == ()
    assert value.dtype == torch.float32
    assert all(x.shape == () and not x.requires_grad for x in metrics.values())
    assert all("/" in key for key in metrics)


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
    ],
)
def test_policy_loss_refuses(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**fields)  # type: ignore[arg-type]


def test_missing_horizon_and_clip_are_refused() -> None:
    with pytest.raises(ValueError, match="Set horizon"):
        PolicyLoss(aggregation="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="Set horizon"):
        SFTLoss(aggregation="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match=r"clip=0\.0.*None for no clip"):
        ValueLoss(clip=0.0)
