from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional import Counts, PolicyLoss, SequencePolicyLoss
from tests.unit.functional.cases import close, mask_of
from tests.unit.functional.rows import batch_of, gradient


def test_by_hand() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    new = torch.tensor([[2.0, 8.0], [0.5, 0.5]]).log()  # s = 4 and 0.5
    rows = {
        "response_mask": mask,
        "log_probs": torch.zeros(2, 2),
        "advantages": torch.tensor([[1.0, 1.0], [1.0, 1.0]]),
    }
    loss = SequencePolicyLoss(clip_low=0.1, clip_high=0.2, track_entropy=False)
    value, _ = loss({"log_probs": new}, rows, Counts.of(mask))
    close(value, -(1.2 + 0.5) / 2)
    close(gradient(loss, {"log_probs": new}, rows), [[0.0, 0.0], [-0.125, -0.125]])


def test_token_advantages_keep_their_tokens() -> None:
    """GSPO-token, eq. 13: each token's own advantage at the response's ratio."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    rows = {"response_mask": mask, "log_probs": torch.zeros(1, 2), "advantages": torch.tensor([[1.0, 3.0]])}
    outputs = {"log_probs": torch.tensor([[0.1, 0.3]])}
    loss = SequencePolicyLoss(clip_low=0.5, clip_high=0.5, track_entropy=False)
    close(gradient(loss, outputs, rows), [[-0.5 * math.exp(0.2), -1.5 * math.exp(0.2)]])


def test_defaults_and_the_rest_is_inherited() -> None:
    loss = SequencePolicyLoss()
    assert (loss.clip_low, loss.clip_high, loss.aggregation) == (3e-4, 4e-4, "seq-mean-token-mean")
    mask = mask_of("gap_inside")
    outputs, rows = batch_of(mask)
    counts = Counts.of(mask)
    plain, metrics = SequencePolicyLoss(track_entropy=False)(outputs, rows, counts)
    full, more = SequencePolicyLoss(kl_coef=0.1, entropy_coef=0.01)(outputs, rows, counts)
    parent, parents = PolicyLoss(aggregation="seq-mean-token-mean", track_entropy=False)(
        outputs, rows, counts
    )
    whole, _ = PolicyLoss(aggregation="seq-mean-token-mean", kl_coef=0.1, entropy_coef=0.01)(
        outputs, rows, counts
    )
    close(full - plain, float(whole - parent))
    close(metrics["actor/ratio"], float(parents["actor/ratio"]))
    assert set(more) - set(metrics) == {"actor/kl_loss", "actor/entropy"}
    with pytest.raises(ValueError, match=r"SequencePolicyLoss\(clip_low=2"):
        SequencePolicyLoss(clip_low=2.0)
