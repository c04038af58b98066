from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import Counts, KTOLoss, kto_baseline, kto_loss, of_other_prompts
from tests.unit.functional.cases import close, noise
from tests.unit.functional.offline import batch_of, mask_of


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_formula_by_hand() -> None:
    r, labels = torch.tensor([3.0, 3.0, 1.0, -2.0]), torch.tensor([True, False, True, False])
    loss = kto_loss(r, labels, torch.tensor(1.0), beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    close(loss, [2 * (1 - sigmoid(1.0)), 3 * (1 - sigmoid(-1.0)), 1.0, 3 * (1 - sigmoid(1.5))])


def test_both_labels_mirror_each_other() -> None:
    """What a desirable answer loses above the baseline, an undesirable one loses as far below."""
    r, z0 = noise(torch.ones(6, dtype=torch.bool), 0), torch.tensor(0.4)
    desirable = torch.ones(6, dtype=torch.bool)
    close(kto_loss(r, desirable, z0), kto_loss(2 * z0 - r, ~desirable, z0).tolist())
    close(kto_loss(r, desirable, z0) + kto_loss(r, ~desirable, z0), [1.0] * 6)


def test_large_ratios_keep_their_precision() -> None:
    r = torch.tensor([300.0, -300.0], requires_grad=True)
    loss = kto_loss(r, torch.tensor([True, False]), torch.tensor(0.0))
    assert loss[0].item() == pytest.approx(math.exp(-30), rel=1e-5)  # 1 - sigma(30) would be 0
    torch.autograd.backward(loss.sum())
    assert r.grad is not None
    assert torch.isfinite(r.grad).all()


def test_baseline_by_hand() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)
    policy = torch.tensor([[-1.0, -1.0], [-3.0, math.nan], [math.inf, math.nan]], requires_grad=True)
    reference = torch.tensor([[-2.0, -1.5], [-2.5, 0.0], [0.0, 0.0]])
    found = kto_baseline(policy, reference, mask)
    close(found, (1.5 - 0.5) / 2)
    assert not found.requires_grad
    assert kto_baseline(reference, policy, mask) == 0  # never below 0
    assert kto_baseline(policy, reference, torch.zeros_like(mask)) == 0


def test_an_answer_without_tokens_does_not_count() -> None:
    mask = torch.tensor([[1, 1], [0, 0], [1, 0]], dtype=torch.bool)
    rows = {"response_mask": mask, "labels": torch.tensor([True, True, False])}
    assert KTOLoss().count(rows) == Counts(tokens=3, sequences=2, groups=1)


def test_defaults_are_those_of_the_authors() -> None:
    assert KTOLoss() == KTOLoss(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, baseline=True)


def test_labels_may_be_signs() -> None:
    outputs, rows = batch_of(mask_of("right_padding"))
    counts = KTOLoss().count(rows)
    signs = rows | {"labels": torch.where(rows["labels"], 1.0, -1.0)}
    assert KTOLoss().count(signs) == counts
    assert torch.equal(KTOLoss()(outputs, signs, counts)[0], KTOLoss()(outputs, rows, counts)[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": 0.0}, r"beta=0\.0.*Try 0\.1"),
        ({"desirable_weight": -1.0}, r"desirable_weight=-1\.0.*Try 1\.0"),
        ({"undesirable_weight": -0.5}, r"undesirable_weight=-0\.5.*Try 1\.0"),
    ],
)
def test_refusals(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KTOLoss(**fields)  # type: ignore[arg-type]


def test_answers_of_one_label_may_be_left_out() -> None:
    r, desirable = torch.tensor([1.0, -1.0]), torch.tensor([True, False])
    weights = KTOLoss(undesirable_weight=0.0, desirable_weight=2.0)
    found = kto_loss(
        r,
        desirable,
        torch.zeros(()),
        desirable_weight=weights.desirable_weight,
        undesirable_weight=weights.undesirable_weight,
    )
    assert found[0] > 0
    assert found[1] == 0


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("aabb", [2, 3, 0, 1]),
        ("aabbcc", [4, 5, 0, 1, 2, 3]),
        ("aaba", [2, 2, 1, 2]),
        ("baaa", [3, 0, 0, 0]),
        ("abc", [2, 0, 1]),
        ("aaa", None),
        ("a", None),
    ],
)
def test_a_mismatched_answer_is_to_another_prompt(prompts: str, expected: list[int] | None) -> None:
    """Each answer once where that is possible: every second one would be of one label where pairs stand."""
    ids = torch.tensor([[0, ord(prompt)] for prompt in prompts])
    found = of_other_prompts(ids, ids > 0)
    assert (None if found is None else found.tolist()) == expected
    with pytest.raises(ValueError, match="shorter"):
        of_other_prompts(ids, ids[1:] > 0)
