"""One forward pass over the packed rows of a micro-batch: log-probabilities or values of response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_lightning.engines.dtensor import local
from rlhf_lightning.engines.head import Asked, Head
from rlhf_lightning.engines.packed.log_probs import likeliest_words, token_log_probs
from rlhf_lightning.engines.packed.packing import PackedRows, pack
from rlhf_lightning.engines.packed.record import Record


class Vocabulary(NamedTuple):
    """The words that logits are of."""

    size: int
    """Their number over all ranks, without padding."""
    group: dist.ProcessGroup | None
    """The ranks among which they are divided, in shards of equal size; None: this rank has all."""


def forward(
    root: nn.Module,
    rows: Mapping[str, Tensor],
    *,
    head: Head,
    temperature: float,
    asked: Asked,
    record: Record | None = None,
) -> dict[str, Tensor]:
    """Compute the outputs of a micro-batch, differentiably.

    Args:
        root: a causal language model, or a `ScalarModel`.
        rows: prompt_ids, prompt_mask [n, P], response_ids, response_mask [n, R], on the model's device; and
            the candidates that are asked for.
        head: which outputs; `lm` gives log-probabilities.
        temperature: divides the logits; 0 (greedy) counts as 1.
        asked: what `lm` computes beside log-probabilities.
        record: matrix products of `lm` that a generation has computed already.

    Returns:
        See `TrainEngine.infer`.
    """
    packed = pack(rows, place="after" if head == "reward" else "before")
    places = {"position_ids": packed.sequences.position_ids, "sequences": packed.sequences}
    if head != "lm":
        return {"values": packed.unpack(root(packed.input_ids, keep=packed.keep, **places)[:, 0])}
    with record.given(packed) if record is not None else nullcontext():
        logits = root(packed.input_ids, use_cache=False, logits_to_keep=packed.keep, **places).logits
    group = logits.device_mesh.get_group() if isinstance(logits, DTensor) else None
    words = Vocabulary(logits.shape[2], group)
    kept = local(logits).squeeze(0)  # its backward pass is free, that of an index is not
    return said(kept, packed, rows, words=words, temperature=temperature, asked=asked)


def said(
    logits: Tensor,
    packed: PackedRows,
    rows: Mapping[str, Tensor],
    *,
    words: Vocabulary,
    temperature: float,
    asked: Asked,
) -> dict[str, Tensor]:
    """The outputs of a language model by its logits [K, S]; S is this rank's number of words.

    Raises:
        ValueError: more of the likeliest words are wanted than there are, a candidate is no word, or the
            column of candidates is not [B, R, k].
    """
    targets = packed.targets[:, None]
    if asked.likeliest:
        among = min(asked.among or words.size, words.size)
        found = likeliest_words(logits.detach(), asked.likeliest, vocabulary=among, group=words.group)
        targets = torch.cat([targets, found], 1)
    elif asked.candidates:
        wanted = _candidates(packed, _checked(rows[asked.candidates]), words.size)
        targets = torch.cat([targets, wanted], 1)
    log_probs, entropies = token_log_probs(
        logits,
        targets,
        vocabulary=words.size,
        temperature=temperature or 1.0,
        entropy=asked.entropy,
        group=words.group,
    )
    outputs = {"log_probs": log_probs[:, 0]} | ({"entropy": entropies} if asked.entropy else {})
    if targets.shape[1] > 1:
        outputs["candidate_log_probs"] = log_probs[:, 1:]
    if asked.likeliest:
        outputs["candidate_ids"] = targets[:, 1:].int()
    return {name: packed.unpack(values) for name, values in outputs.items()}


def _candidates(packed: PackedRows, column: Tensor, size: int) -> Tensor:
    """The candidates of the response tokens: [K, k] int64.

    Raises:
        ValueError: one is no word of this model.
    """
    found = packed.packed(column).long()
    least, most = (int(end) for end in torch.aminmax(found)) if found.numel() else (0, 0)
    if not 0 <= least <= most < size:
        raise ValueError(
            f"the candidates {least} to {most} are to be words of a model that has {size}. Ask the other "
            f"model for words of both: compute_ref_candidates(batch, among={size})."
        )
    return found


def _checked(column: Tensor) -> Tensor:
    """A column of candidates, [B, R, k].

    Raises:
        ValueError: it has another number of dimensions.
    """
    if column.dim() != 3:
        raise ValueError(
            f"candidates of the shape {list(column.shape)}: each token has some, [B, R, k]. Of one make "
            "column[..., None]."
        )
    return column


def zero_outputs(rows: TensorDict, *, head: Head, asked: Asked) -> dict[str, Tensor]:
    """The outputs that `forward` computes, by name, as zeros on the host to be filled row by row.

    Raises:
        ValueError: the column of the candidates that are asked for is not [B, R, k].
    """
    shape = rows["response_mask"].shape
    if head != "lm":
        return {"values": torch.zeros(shape)}
    found = {name: torch.zeros(shape) for name in ("log_probs", *(["entropy"] if asked.entropy else ()))}
    width = asked.likeliest or (_checked(rows[asked.candidates]).shape[2] if asked.candidates else 0)
    if width:
        found["candidate_log_probs"] = torch.zeros(*shape, width)
    if asked.likeliest:
        found["candidate_ids"] = torch.zeros(*shape, width, dtype=torch.int32)
    return found
