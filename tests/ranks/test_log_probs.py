"""Log-probabilities of logits in shards, against those of whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines.packed.log_probs import likeliest_words, token_log_probs
from tests.unit import spmd

TOKENS, RANKS, SHARD = 5, 4, 3
TEMPERATURE = 0.7


def logits() -> Tensor:
    """Of all words with the padding, which must count for nothing however large it is."""
    generator = torch.Generator().manual_seed(0)
    return 5 * torch.randn(TOKENS, RANKS * SHARD, generator=generator) + torch.arange(RANKS * SHARD)


def total(log_probs: Tensor, entropies: Tensor) -> Tensor:
    """Something with a different gradient in each output."""
    weights = torch.arange(1.0, TOKENS + 1)
    return (weights * log_probs.T).sum() + (weights.sqrt() * (log_probs[:, 1] + entropies)).sum()


def targets(vocabulary: int) -> Tensor:
    """Two words for each token, which may be the same."""
    return torch.stack([torch.arange(TOKENS) * 2 % vocabulary, torch.arange(TOKENS) % vocabulary], 1)


def shard(group: dist.ProcessGroup, vocabulary: int, *, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's log-probabilities, entropies and gradient."""
    mine = logits()[:, group.rank() * SHARD :][:, :SHARD].clone().requires_grad_()
    found = token_log_probs(
        mine,
        targets(vocabulary),
        vocabulary=vocabulary,
        temperature=TEMPERATURE,
        entropy=entropy,
        group=group,
    )
    torch.autograd.backward(total(*found))
    assert mine.grad is not None
    none = mine.new_zeros(0, SHARD)
    empty = token_log_probs(
        none, torch.zeros(0, 2).long(), vocabulary=vocabulary, temperature=1.0, entropy=entropy, group=group
    )
    assert [x.shape for x in empty] == [(0, 2), (0,)]
    return found[0].detach(), found[1].detach(), mine.grad


@pytest.mark.parametrize(("ranks", "vocabulary"), [(4, 12), (4, 10), (4, 8), (1, 2)])
@pytest.mark.parametrize("entropy", [True, False])
def test_shards_say_what_the_whole_says(ranks: int, vocabulary: int, *, entropy: bool) -> None:
    """The last of four ranks has words only, one word and padding, and padding only."""
    whole = logits()[:, :vocabulary].clone().requires_grad_()
    expected = token_log_probs(
        whole, targets(vocabulary), vocabulary=vocabulary, temperature=TEMPERATURE, entropy=entropy
    )
    torch.autograd.backward(total(*expected))
    assert whole.grad is not None
    results = spmd.run(ranks, shard, vocabulary, entropy=entropy)
    for log_probs, entropies, _ in results:
        torch.testing.assert_close(log_probs, expected[0].detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies, expected[1].detach(), rtol=1e-5, atol=1e-5)
    gradient = torch.cat([grad for *_, grad in results], dim=1)
    torch.testing.assert_close(gradient[:, :vocabulary], whole.grad, rtol=1e-5, atol=1e-5)
    assert not gradient[:, vocabulary:].any()


def likeliest(group: dist.ProcessGroup, vocabulary: int, count: int) -> Tensor:
    mine = logits()[:, group.rank() * SHARD :][:, :SHARD].bfloat16()
    return likeliest_words(mine, count, vocabulary=vocabulary, group=group)


@pytest.mark.parametrize(
    ("ranks", "vocabulary", "count"), [(4, 12, 5), (4, 12, 12), (4, 10, 2), (4, 8, 8), (1, 2, 1)]
)
def test_the_likeliest_words_are_those_of_the_whole(ranks: int, vocabulary: int, count: int) -> None:
    """More words than a shard has are drawn from several; padding is no word, however large it is."""
    whole = logits()[:, :vocabulary].bfloat16()
    expected = whole.topk(count, dim=1).values
    found = spmd.run(ranks, likeliest, vocabulary, count)
    for words in found:
        assert torch.equal(words, found[0])
        assert torch.equal(whole.gather(1, words), expected)
        assert all(len(set(row)) == count for row in words.tolist())
