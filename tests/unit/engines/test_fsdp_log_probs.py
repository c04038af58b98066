"""Chunked log-probabilities and entropies against plain autograd."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.engines import log_probs
from rlhf_lightning.engines.log_probs import token_log_probs


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int, temperature: float, entropy: bool
) -> None:
    monkeypatch.setitem(log_probs._CHUNK_ELEMENTS, "cpu", rows_per_chunk * 11)
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(8, 11, generator=generator)).requires_grad_()
    targets = torch.randint(0, 11, (8,), generator=generator)
    weights = torch.randn(2, 8, generator=generator) * torch.tensor([[1.0], [float(entropy)]])
    ours = token_log_probs(logits, targets, temperature=temperature, entropy=entropy)
    ((ours[0] * weights[0]).sum() + (ours[1] * weights[1]).sum()).backward()
    exact = logits.detach().double().requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    theirs = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((theirs[0] * weights[0]).sum() + (theirs[1] * weights[1]).sum()).backward()
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(ours[0], theirs[0].float())
    torch.testing.assert_close(ours[1], theirs[1].float() if entropy else torch.zeros(8))
    torch.testing.assert_close(logits.grad, exact.grad.float(), atol=1e-6, rtol=1e-5)


def test_bfloat16_logits_are_widened_before_anything_is_computed() -> None:
    logits, targets = torch.randn(4, 50).bfloat16(), torch.tensor([0, 1, 2, 3])
    ours = token_log_probs(logits, targets, temperature=1.0, entropy=True)
    theirs = token_log_probs(logits.float(), targets, temperature=1.0, entropy=True)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_no_tokens() -> None:
    ours = token_log_probs(
        torch.empty(0, 5), torch.empty(0, dtype=torch.int64), temperature=1.0, entropy=True
    )
    assert [len(values) for values in ours] == [0, 0]
