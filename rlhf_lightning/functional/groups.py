"""Advantages of a response against the other responses to its prompt: the formulas of GRPO, RLOO, OPO.

Legend: B rows, R response width; everything is [B] float32 unless said otherwise. Rows that do not count may
hold any values.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import widened, zero_masked

Scale = Literal["std", "none"]
Single = Literal["zero", "score"]


def rows_of_groups(groups: Tensor, *, size: int) -> Tensor:
    """Row numbers [G size] int64 of groups [G] int64, in their order; a group is `size` neighbouring rows."""
    return (groups[:, None] * size + torch.arange(size)).flatten()


def neighbour_groups(scores: Tensor, size: int) -> Tensor:
    """The group of each row, [B] int64, where a group is `size` neighbouring rows of the scores [B]."""
    return torch.arange(len(scores), device=scores.device) // size


def group_advantages(
    scores: Tensor,
    groups: Tensor,
    *,
    valid: Tensor | None = None,
    scale: Scale = "std",
    eps: float = 1e-6,
    single: Single = "zero",
) -> Tensor:
    """Compare each response with the other responses to the same prompt: (R - mean_g) / (std_g + eps).

    GRPO, DeepSeekMath section 4.1, the standard deviation unbiased; `scale="none"` is Dr.GRPO's R - mean_g. A
    group whose scores are all equal gives 0.

    Args:
        scores: [B] one outcome per response.
        groups: [B] int64, equal for the responses to one prompt, in any order.
        valid: [B] bool, False for a row that must not count (fully masked): its advantage is 0. None: all do.
        scale: divide by the group's standard deviation (`std`) or not (`none`).
        eps: added to the standard deviation; 1e-6 as in verl (TRL 1e-4, OpenRLHF 1e-9).
        single: a group of one gives `zero` (NeMo-RL) or its `score` over 1 + eps (verl: mean 0, std 1).

    Returns:
        [B] float32.
    """
    deviation, count = _deviation(scores, groups, valid)
    advantages = _with_single(deviation, scores, count, single)
    return advantages if scale == "none" else per_std(advantages, group_std(scores, groups, valid=valid), eps)


def per_std(advantages: Tensor, std: Tensor, eps: float) -> Tensor:
    """Divide [B] by [B] standard deviations plus `eps`; 0 where all scores of a group are the same."""
    return advantages / (std + eps).clamp(min=torch.finfo(std.dtype).tiny)


def leave_one_out(
    scores: Tensor, groups: Tensor, *, valid: Tensor | None = None, single: Single = "zero"
) -> Tensor:
    """Compare each response with the mean of the others: R - mean of the others = n / (n - 1) (R - mean_g).

    RLOO, Ahmadian 2024 (arXiv 2402.14740) section 2.3.

    Args:
        scores: [B] one outcome per response.
        groups: [B] int64, as in `group_advantages`.
        valid: [B] bool, as there.
        single: a group of one gives `zero` or its `score` (verl).

    Returns:
        [B] float32.
    """
    deviation, count = _deviation(scores, groups, valid)
    return _with_single(deviation * count / (count - 1).clamp(min=1), scores, count, single)


def optimal_baseline(
    scores: Tensor,
    lengths: Tensor,
    groups: Tensor,
    *,
    valid: Tensor | None = None,
    single: Single = "zero",
) -> Tensor:
    """Compare each response with its group's length-weighted mean: R - sum(l R) / sum(l).

    OPO, Hao 2025 (arXiv 2505.23585): the baseline of least variance where the squared gradient of a
    response grows with its length.

    Args:
        scores: [B] one outcome per response.
        lengths: [B] valid tokens of each.
        groups: [B] int64, as in `group_advantages`.
        valid: [B] bool, as there.
        single: a group of one gives `zero` or its `score` (verl).

    Returns:
        [B] float32.
    """
    deviation, count = _deviation(scores, groups, valid, weights=lengths)
    return _with_single(deviation, scores, count, single)


def group_std(scores: Tensor, groups: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Unbiased standard deviation of each row's group, [B]; 1 for a group of one, which has none (verl)."""
    deviation, count = _deviation(scores, groups, valid)
    index = torch.unique(groups, return_inverse=True)[1]
    wide = deviation.double()  # the squares of finite scores may be beyond float32
    squares = torch.zeros_like(wide).index_add(0, index, wide.square())[index]
    return torch.where(count == 1, 1.0, (squares / (count - 1).clamp(min=1)).sqrt()).to(deviation.dtype)


def varied_groups(scores: Tensor, group_size: int) -> Tensor:
    """Mark the groups whose scores differ, the only ones that teach: dynamic sampling, DAPO eq. 11.

    Args:
        scores: [B] one outcome per response, the responses to a prompt side by side.
        group_size: responses to each prompt.

    Returns:
        [B / group_size] bool.

    Raises:
        ValueError: groups of one, or rows that are no whole groups.
    """
    if group_size < 2 or len(scores) % group_size:
        raise ValueError(
            f"varied_groups({len(scores)} scores, group_size={group_size}): scores are compared within whole "
            "groups of at least two. Generate a multiple of group_size responses, group_size at least 2."
        )
    grouped = scores.view(-1, group_size)
    return (grouped != grouped[:, :1]).any(dim=1)


def tied_share(scores: Tensor, groups: Tensor) -> float | None:
    """Share of the groups of two rows or more whose scores are all the same, so that none of them teaches.

    Args:
        scores: [B] one outcome per response.
        groups: [B] int64, equal for the responses to one prompt, in any order.

    Returns:
        The share; None where all groups are of one row.
    """
    index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)[1:]
    varied = _varied(scores, index, torch.ones_like(groups, dtype=torch.bool))
    tied = torch.ones_like(sizes, dtype=torch.bool).scatter(0, index, ~varied)[sizes > 1]
    return float(tied.float().mean()) if len(tied) else None


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """Give every valid token of a response the response's advantage.

    Args:
        advantages: [B].
        mask: [B, R] bool.

    Returns:
        [B, R].

    Raises:
        ValueError: there is not one for each response.
    """
    if advantages.shape != mask.shape[:1]:
        raise ValueError(
            f"spread({list(advantages.shape)}, mask {list(mask.shape)}): takes one number for each response. "
            "Make it of numbers for each token by masked_sum(x, mask, dim=1)."
        )
    return zero_masked(advantages[:, None].expand(mask.shape), mask)


def _deviation(
    scores: Tensor, groups: Tensor, valid: Tensor | None, *, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Score of each row less its group's (weighted) mean, [B], and how many rows of its group count, [B]."""
    valid = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid
    scores = zero_masked(scores, valid)
    weights = zero_masked(torch.ones_like(scores) if weights is None else weights, valid).to(scores.dtype)
    index = torch.unique(groups, return_inverse=True)[1]
    none = scores.new_zeros(len(scores))
    total = none.index_add(0, index, weights)[index]
    mean = none.index_add(0, index, weights * scores)[index] / torch.where(total > 0, total, 1.0)
    count = zero_masked(none.index_add(0, index, valid.to(scores.dtype))[index], valid)
    return zero_masked(scores - mean, valid & _varied(scores, index, valid)), count


def _varied(scores: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """[B] bool, rows of groups whose scores differ; exactly, whereas differences from a mean are rounded."""
    inf = torch.full_like(scores, torch.inf)
    low = inf.scatter_reduce(0, index, torch.where(valid, scores, inf), "amin")
    high = (-inf).scatter_reduce(0, index, torch.where(valid, scores, -inf), "amax")
    return (low < high)[index]


def _with_single(deviation: Tensor, scores: Tensor, count: Tensor, single: Single) -> Tensor:
    """Replace the deviation of groups of one by their score, if `single` says so."""
    return torch.where(count == 1, widened(scores), deviation) if single == "score" else deviation
