"""The bound of throughput.py: against what PyTorch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.bound import Batch

pytestmark = pytest.mark.unit

ROWS, PROMPT, RESPONSE = 3, 5, 8
CONFIG = LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def counted(*, backward: bool) -> int:
    """Operations of all passes over a batch but for those that read the last token."""
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager")
    ids = torch.zeros(ROWS, PROMPT + RESPONSE - 1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        logits = model(ids, use_cache=False, logits_to_keep=RESPONSE).logits
        if backward:
            logits.sum().backward()
    return int(counter.get_total_flops())


def full_attention() -> int:
    """Operations of scores and sums over all pairs of tokens, of which a causal mask needs half."""
    return 4 * CONFIG.num_hidden_layers * CONFIG.hidden_size * ROWS * (PROMPT + RESPONSE - 1) ** 2


def unread() -> float:
    """Operations of the last layer for a prompt's tokens: all but keys and values, of all but the last."""
    products = 2 * ROWS * (PROMPT - 1) * (2 * 32 * 32 + 3 * 32 * 48)
    return products + 4 * CONFIG.hidden_size * ROWS * PROMPT**2 / 2


def batch(samples: int) -> Batch:
    """All rows."""
    return Batch(prompts=ROWS * PROMPT / samples, responses=ROWS * RESPONSE, rows=ROWS, samples=samples)


def test_a_forward_pass() -> None:
    """To 1%: a token sees itself, so that pairs are a few more than half."""
    found = batch(samples=1).forward_flop(CONFIG, head=True)
    assert found == pytest.approx(counted(backward=False) - full_attention() / 2 - unread(), rel=0.01)


def test_a_backward_pass_has_twice_as_many() -> None:
    """GRPO generates, and goes back from there."""
    expected = counted(backward=True) - 3 * (full_attention() / 2 + unread())
    assert batch(samples=1).iteration_flop(CONFIG, "grpo") == pytest.approx(expected, rel=0.01)


def test_passes_of_the_algorithms() -> None:
    one = batch(samples=1)
    policy, values = (one.forward_flop(CONFIG, head=head) for head in (True, False))
    expected = {
        "grpo": 3 * policy,
        "ppo": 4 * policy + 3 * values,
        "remax": 5 * policy,
        "saferlhf": 4 * policy + 6 * values,
    }
    assert {algo: one.iteration_flop(CONFIG, algo) for algo in expected} == pytest.approx(expected)


def test_a_shared_prompt_counts_once() -> None:
    """A whole layer: queries, keys, values, output; gate, up, down; half of the scores and sums.

    Then the keys and values of another, and the rest of it for the last token.
    """
    alone, shared = (batch(samples).forward_flop(CONFIG, head=True) for samples in (1, ROWS))
    kept, beside = 32 * 2 * 16, 32 * 2 * 32 + 3 * 32 * 48
    prompt = 2 * (2 * kept + beside) * PROMPT + 2 * beside + 4 * 32 * PROMPT**2 / 2
    assert alone - shared == pytest.approx((ROWS - 1) * prompt)
