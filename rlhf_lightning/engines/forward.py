"""One pass of a model over the packed rows of a micro-batch: what it says about each response token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from rlhf_lightning.engines.log_probs import token_log_probs
from rlhf_lightning.engines.packing import pack

Head = Literal["lm", "scalar", "reward"]
"""Log-probabilities; a number before each response token (a critic's value), or after it (a reward)."""


def forward(
    root: nn.Module, rows: Mapping[str, Tensor], *, head: Head, temperature: float, entropy: bool
) -> dict[str, Tensor]:
    """Outputs of a micro-batch, differentiable.

    Args:
        root: a causal language model, or a `ScalarModel`.
        rows: prompt_ids, prompt_mask [n, P], response_ids, response_mask [n, R], on the model's device.
        head: which outputs.
        temperature: divides the logits; 0 (greedy) counts as 1.
        entropy: whether `lm` computes the entropy too.

    Returns:
        log_probs and, if asked for, entropy; or values: [n, R] float32, 0 where the response mask is False.
    """
    packed = pack(rows, place="after" if head == "reward" else "before")
    places = {"position_ids": packed.sequences.position_ids, "sequences": packed.sequences}
    if head != "lm":
        return {"values": packed.unpack(root(packed.input_ids, keep=packed.keep, **places)[:, 0])}
    logits = root(packed.input_ids, use_cache=False, logits_to_keep=packed.keep, **places).logits[0]
    if len(logits) != len(packed.keep):  # a model that does not know logits_to_keep
        logits = logits[packed.keep]
    log_probs, entropies = token_log_probs(
        logits, packed.targets, temperature=temperature or 1.0, entropy=entropy
    )
    outputs = {"log_probs": packed.unpack(log_probs)}
    return outputs | {"entropy": packed.unpack(entropies)} if entropy else outputs
