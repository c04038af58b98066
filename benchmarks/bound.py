"""The operations that an iteration cannot do without, and the rate at which this machine does them at most.

Counted, of each of an algorithm's passes over the batch: two operations for every weight of a matrix product
and every token, the scores and sums of attention over what a token sees, and the output layer for the tokens
of responses. A backward pass has twice as many. The last token of a row is in no pass, as nothing is read off
it, and of a prompt's tokens but the last the last layer needs keys and values alone. A prompt that several
rows answer counts once.

Not counted: embeddings, norms, losses, optimizer steps, a critic's output layer, rewards (rules here), the
log-probabilities of drawn tokens (known from drawing them), the actor's pass before it goes back (drawing by
the same weights has computed all of it), and everything between devices.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What an algorithm does with the batch of an iteration."""

    policy: int
    """Forward passes of models with a vocabulary: generations, of which one is the update's, reference."""
    policy_updates: int = 1
    """Backward passes of the actor."""
    value_updates: int = 0
    """Forward and backward passes of critics, whose first pass gives the values too."""


PASSES: Mapping[str, Passes] = {
    "grpo": Passes(policy=1),
    "ppo": Passes(policy=2, value_updates=1),
    "remax": Passes(policy=3),
    "saferlhf": Passes(policy=2, value_updates=2),
}
"""By algorithm, as `ours_throughput.py` sets it: one epoch, one update, GRPO without a reference."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens of an iteration."""

    prompts: float
    """Of the prompts, each once."""
    responses: float
    """Of the responses."""
    rows: int
    """Responses."""
    samples: int
    """Responses of each prompt."""

    def forward_flop(self, config: PretrainedConfig, *, head: bool) -> float:
        """Operations of one forward pass; `head` says whether there is a vocabulary.

        Attention is counted as if all rows were of mean length, which is at most what it is.
        """
        tokens = self.prompts + self.responses - self.rows
        layers, hidden = config.num_hidden_layers, config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        kept = config.num_key_value_heads * config.head_dim
        beside = 2 * hidden * queries + 3 * hidden * config.intermediate_size
        weights = layers * (beside + 2 * hidden * kept)
        silent = self.prompts - self.rows / self.samples
        prompt, response = self.prompts * self.samples / self.rows, self.responses / self.rows
        seen = (layers - 1) * self.rows / self.samples * prompt**2 / 2
        seen += layers * self.rows * (response - 1) * (prompt + response / 2)
        logits = 2 * self.responses * hidden * config.vocab_size if head else 0.0
        return float(2 * (weights * tokens - beside * silent) + 4 * queries * seen + logits)

    def iteration_flop(self, config: PretrainedConfig, algo: str) -> float:
        """Operations of a whole iteration."""
        passes = PASSES[algo]
        policy, values = (self.forward_flop(config, head=head) for head in (True, False))
        return (passes.policy + 2 * passes.policy_updates) * policy + 3 * passes.value_updates * values


def matrix_rate(
    threads: int, dtype: torch.dtype = torch.float32, *, side: int = 2048, rounds: int = 8
) -> float:
    """Operations a second in products of large squares: the best of the rounds."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = torch.randn(side, side, dtype=dtype), torch.randn(side, side, dtype=dtype)
        seconds = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            a @ b
            seconds.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return 2 * side**3 / min(seconds[1:])
