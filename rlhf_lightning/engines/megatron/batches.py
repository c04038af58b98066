"""Rows of a replica -> micro-batches of a token budget -> packed rows -> log-probabilities."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.megatron.schedule import Rows
from rlhf_lightning.engines.packed.packing import PackedRows, Place, micro_batches, pack, row_lengths, select
from rlhf_lightning.engines.packed.vocabulary import parallel_token_log_probs
from rlhf_lightning.functional.aggregate import Loss


def plan(rows: TensorDict, budget: int, *, loss: Loss | None, multiple: int) -> list[list[int]]:
    """Row numbers of each micro-batch, followed by empty ones.

    Args:
        rows: of the replica.
        budget: most tokens in a micro-batch.
        loss: if there is one, there is at least one micro-batch, so that there are metrics.
        multiple: the number of micro-batches is a multiple of this.
    """
    lengths = row_lengths(rows["prompt_mask"], rows["response_mask"])
    parts = micro_batches(lengths, budget, together=loss.rows_together if loss else 1)
    count = max(len(parts), int(loss is not None))
    return parts + [[] for _ in range(count + -count % multiple - len(parts))]


def packed(
    rows: TensorDict, index: list[int], *, device: torch.device, place: Place, loss: Loss | None
) -> tuple[Rows, PackedRows]:
    """Select and pack rows, with the columns that the loss reads; fully masked rows if `index` is empty.

    Raises:
        ValueError: a column is missing.
    """
    columns, filler = (loss.columns, loss.rows_together) if loss else ((), 1)
    part = select(rows, index, columns, filler=filler, device=device)
    return part, pack(part, place=place)


def probabilities(
    logits: Tensor,
    packed: PackedRows,
    *,
    vocabulary: int,
    temperature: float,
    entropy: bool,
    group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """Log-probabilities and, if asked for, entropies of a micro-batch.

    Args:
        logits: [K, S], this rank's words, for the kept tokens.
        packed: the micro-batch.
        vocabulary: number of words, without padding.
        temperature: divides the logits; 0 (greedy) counts as 1.
        entropy: whether to return entropies.
        group: the tensor ranks.

    Returns:
        [n, R] float32, 0 where the response mask is False.
    """
    log_probs, entropies = parallel_token_log_probs(
        logits,
        packed.targets,
        vocabulary=vocabulary,
        temperature=temperature or 1.0,
        entropy=entropy,
        group=group,
    )
    outputs = {"log_probs": packed.unpack(log_probs)}
    return outputs | {"entropy": packed.unpack(entropies)} if entropy else outputs
