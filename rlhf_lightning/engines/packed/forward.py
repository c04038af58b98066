"""One forward pass over the packed rows of a micro-batch: log-probabilities or values of response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_lightning.engines.dtensor import local
from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.packed.log_probs import parallel_token_log_probs, token_log_probs
from rlhf_lightning.engines.packed.packing import PackedRows, pack
from rlhf_lightning.engines.packed.record import Record


def forward(
    root: nn.Module,
    rows: Mapping[str, Tensor],
    *,
    head: Head,
    temperature: float,
    entropy: bool,
    record: Record | None = None,
) -> dict[str, Tensor]:
    """Compute the outputs of a micro-batch, differentiably.

    Args:
        root: a causal language model, or a `ScalarModel`.
        rows: prompt_ids, prompt_mask [n, P], response_ids, response_mask [n, R], on the model's device.
        head: which outputs; `lm` gives log-probabilities.
        temperature: divides the logits; 0 (greedy) counts as 1.
        entropy: whether `lm` computes the entropy too.
        record: matrix products of `lm` that a generation has computed already.

    Returns:
        log_probs and, if asked for, entropy; or values: [n, R] float32, 0 where the response mask is False.
    """
    packed = pack(rows, place="after" if head == "reward" else "before")
    places = {"position_ids": packed.sequences.position_ids, "sequences": packed.sequences}
    if head != "lm":
        return {"values": packed.unpack(root(packed.input_ids, keep=packed.keep, **places)[:, 0])}
    with record.given(packed) if record is not None else nullcontext():
        logits = root(packed.input_ids, use_cache=False, logits_to_keep=packed.keep, **places).logits
    log_probs, entropies = _evaluated(logits, packed, temperature=temperature or 1.0, entropy=entropy)
    outputs = {"log_probs": packed.unpack(log_probs)}
    return outputs | {"entropy": packed.unpack(entropies)} if entropy else outputs


def zero_outputs(response_mask: Tensor, *, head: Head, entropy: bool) -> dict[str, Tensor]:
    """The outputs that `forward` computes, by name, as zeros on the host to be filled row by row: [n, R]."""
    names = ["values"] if head != "lm" else ["log_probs", "entropy"] if entropy else ["log_probs"]
    return {name: torch.zeros(response_mask.shape, dtype=torch.float32) for name in names}


def _evaluated(
    logits: Tensor, packed: PackedRows, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [K] from logits [1, K, V]; t tensor ranks have [1, K, V / t] each."""
    kept = local(logits).squeeze(0)  # its backward pass is free, that of an index is not
    if not isinstance(logits, DTensor):
        return token_log_probs(kept, packed.targets, temperature=temperature, entropy=entropy)
    return parallel_token_log_probs(
        kept,
        packed.targets,
        vocabulary=logits.shape[2],
        temperature=temperature,
        entropy=entropy,
        group=logits.device_mesh.get_group(),
    )
