"""Chunked log-probabilities and entropies against plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf_lightning.engines.packed import log_probs
from rlhf_lightning.engines.packed.log_probs import chunks, token_log_probs


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("words", [1, 4])
def test_values_and_gradients_are_those_in_float64(
    monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int, temperature: float, entropy: bool, words: int
) -> None:
    """Also where a token has several words, some of them twice."""
    monkeypatch.setitem(log_probs._CHUNK_ELEMENTS, "cpu", rows_per_chunk * 11)
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(8, 11, generator=generator)).requires_grad_()
    targets = torch.randint(0, 11, (8, words), generator=generator)
    drawn = torch.randn(words + 1, 8, generator=generator)
    weights = drawn[:words].T, drawn[words] * entropy
    ours = token_log_probs(
        logits, targets, vocabulary=logits.shape[1], temperature=temperature, entropy=entropy
    )
    ((ours[0] * weights[0]).sum() + (ours[1] * weights[1]).sum()).backward()
    exact = logits.detach().double().requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    theirs = log_p.gather(1, targets), -(log_p.exp() * log_p).sum(-1)
    ((theirs[0] * weights[0]).sum() + (theirs[1] * weights[1]).sum()).backward()
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(ours[0], theirs[0].float())
    torch.testing.assert_close(ours[1], theirs[1].float() if entropy else torch.zeros(8))
    torch.testing.assert_close(logits.grad, exact.grad.float(), atol=1e-6, rtol=1e-5)


def test_bfloat16_logits_are_widened_before_anything_is_computed() -> None:
    logits, targets = torch.randn(4, 50).bfloat16(), torch.arange(4)[:, None]
    ours = token_log_probs(logits, targets, vocabulary=logits.shape[1], temperature=1.0, entropy=True)
    theirs = token_log_probs(logits.float(), targets, vocabulary=50, temperature=1.0, entropy=True)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_a_word_list_longer_than_a_chunk_goes_token_by_token() -> None:
    """On a CPU a chunk has fewer logits than Qwen2 has words."""
    assert chunks(torch.zeros(2, 151_936)) == [slice(0, 1), slice(1, 2)]


def test_no_tokens_have_no_values() -> None:
    ours = token_log_probs(
        torch.empty(0, 5), torch.empty(0, 1, dtype=torch.int64), vocabulary=5, temperature=1.0, entropy=True
    )
    assert [len(values) for values in ours] == [0, 0]


def layer(hidden: Tensor, weight: Tensor, ending: str) -> Tensor:
    """Logits [K, V] as output layers give them."""
    logits = torch.nn.functional.linear(hidden[None], weight)
    endings: dict[str, Callable[[], Tensor]] = {
        "product": lambda: logits.squeeze(0),
        "softcap": lambda: (3 * torch.tanh(logits / 3)).squeeze(0),
        "tanh alone": lambda: torch.tanh(logits).squeeze(0),
        "scaled": lambda: (logits * 0.5).squeeze(0),
    }
    return endings[ending]()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("ending", ["product", "softcap", "tanh alone", "scaled"])
def test_the_gradient_takes_the_place_of_logits_that_nobody_else_needs(ending: str, entropy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 7, generator=generator) for n in (6, 13))
    targets = torch.randint(0, 13, (6, 1), generator=generator)
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.detach().clone().to(dtype).requires_grad_() for x in (hidden, weight)]
        logits = layer(leaves[0], leaves[1], ending)
        if dtype == torch.float32:
            before, memory = logits.detach().clone(), logits.detach()
            log_p, spread = token_log_probs(
                logits, targets, vocabulary=logits.shape[1], temperature=0.8, entropy=entropy
            )
        else:
            every = (logits / 0.8).log_softmax(-1)
            log_p, spread = every.gather(1, targets), -(every.exp() * every).sum(-1)
        (log_p.square().sum() + (spread.square().sum() if entropy else 0.0)).backward()
        found.append([leaf.grad for leaf in leaves])
    for mine, exact in zip(*found, strict=True):
        assert mine is not None
        assert exact is not None
        torch.testing.assert_close(mine, exact.float(), atol=1e-5, rtol=1e-4)
    assert torch.equal(memory, before) == (ending != "product")


def test_logits_of_ones_own_are_left_as_they_are() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    before = logits.detach().clone()
    token_log_probs(logits, torch.arange(3)[:, None], vocabulary=5, temperature=1.0, entropy=False)[
        0
    ].sum().backward()
    assert torch.equal(logits.detach(), before)
