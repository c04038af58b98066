"""The contract of losses, and how they become one number that depends on no micro-batch, rank or placement.

Every mode divides by counts of the whole mini-batch, known before it is split. So the losses of the
micro-batches of all ranks *add up* to the loss of the mini-batch, and so do their gradients:

    mini-batch of 4 rows, 10 tokens    Counts(tokens=10, sequences=4, groups=4)
    rank 0: rows 0, 1 -> sum / 10      rank 1: rows 2, 3 -> sum / 10      all-reduce(SUM) = sum / 10
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from rlhf_lightning.functional.masked import masked_mean, masked_sum
from rlhf_lightning.functional.reading import reading

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
_NORMED: Aggregation = "seq-mean-token-sum-norm"


@dataclass(frozen=True)
class Counts:
    """What a whole mini-batch holds, over all ranks and micro-batches; counts of its parts add up."""

    tokens: int
    """Valid response tokens."""
    sequences: int
    """Rows with at least one valid token."""
    groups: int
    """Groups of neighbouring rows (`Loss.rows_together`) all of which have a valid token."""

    @classmethod
    def of(cls, mask: Tensor, *, together: int = 1) -> Counts:
        """Count the valid tokens, rows and groups of `together` rows of a [B, R] bool mask."""
        rows = mask.any(dim=1)
        groups = int(rows.view(-1, together).all(dim=1).sum())
        return cls(tokens=int(mask.sum()), sequences=int(rows.sum()), groups=groups)

    def __add__(self, other: Counts) -> Counts:
        """Count two parts together."""
        return Counts(
            self.tokens + other.tokens, self.sequences + other.sequences, self.groups + other.groups
        )


class Loss(ABC):
    """What an engine trains with: a frozen, picklable object called once for each micro-batch.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Likelihood(Loss):
        ...     def __call__(self, outputs, rows, counts):
        ...         loss = aggregate(-outputs["log_probs"], rows["response_mask"], "token-mean", counts)
        ...         return loss, {"actor/loss": loss.detach()}
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """Batch columns that it reads beside ids and masks."""
        return ()

    @property
    def needs_entropy(self) -> bool:
        """Whether `outputs` must hold the entropy."""
        return False

    @property
    def candidates(self) -> str:
        """A column [n, R, k] of words, whose log-probabilities `outputs` must hold; one of the `columns`."""
        return ""

    @property
    def rows_together(self) -> int:
        """Neighbouring rows that one term reads, kept on one rank and in one micro-batch; 2 for pairs."""
        return 1

    def count(self, rows: Mapping[str, Tensor]) -> Counts:
        """Counts of these rows; added up over micro-batches and ranks they are what losses are divided by."""
        return Counts.of(rows["response_mask"], together=self.rows_together)

    @abstractmethod
    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows, as parts of those of the mini-batch.

        Args:
            outputs: of the model in training, [n, R]: `log_probs` and, if asked for, `entropy` and
                `candidate_log_probs` [n, R, k]; or `values`.
            rows: `response_mask` [n, R] bool and the `columns`, [n, R] or [n], anything where the mask is
                False; n is a multiple of `rows_together`.
            counts: of the whole mini-batch.

        Returns:
            A scalar and scalars by name, all divided by `counts`: adding over micro-batches and ranks is all
            that remains to do. A rank that has run out of rows, or of whole pairs, calls it with rows of
            which `count` counts none: all are 0 then, and none is left out.
        """


def run_loss(
    loss: Loss, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call a loss, built in or the user's own, and check what it returns.

    Raises:
        ValueError: it read an output or a column that it did not ask for, did not return a scalar and metrics
            by name, or the scalar does not depend on the outputs, though it counts rows to learn from.
    """
    whose = type(loss).__name__
    with reading(whose, outputs=outputs, rows=rows):
        found: object = loss(outputs, rows, counts)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
        raise ValueError(
            f"{whose} returned a {type(found).__name__}: a loss returns a scalar and metrics by name. Write "
            "`return loss, {}` where there are none."
        )
    value, metrics = found
    for name, number in {"": value, **metrics}.items():
        what = f"the metric {name!r}" if name else "the loss"
        if not isinstance(number, Tensor):
            raise ValueError(f"{whose}: {what} is a {type(number).__name__}. Make it a tensor of one number.")
        if number.dim():
            raise ValueError(
                f"{whose}: {what} has the shape {list(number.shape)}, and has to be one number. Reduce "
                'numbers of tokens by aggregate(x, rows["response_mask"], "token-mean", counts).'
            )
    if not value.requires_grad and any(output.requires_grad for output in outputs.values()):
        if loss.count(rows) != Counts(0, 0, 0):
            raise ValueError(
                f"{whose}: the loss does not depend on outputs, so nothing would be learned. Columns of rows "
                "are constants: take outputs['log_probs'], not rows['log_probs']."
            )
        # Collectives in the backward pass need every rank, also one without rows that count.
        value = value + sum(output.sum() for output in outputs.values()) * 0
    return value, dict(metrics)


def aggregate(x: Tensor, mask: Tensor, mode: Aggregation, counts: Counts, *, horizon: int = 0) -> Tensor:
    """Reduce numbers of tokens to this micro-batch's part of the mini-batch's number.

    Args:
        x: [B, R], may hold anything where the mask is False.
        mask: [B, R] bool; a fully masked row contributes nothing.
        mode: `token-mean`: sum / tokens (DAPO). `seq-mean-token-sum`: sum / sequences.
            `seq-mean-token-mean`: mean of each row's mean (GRPO). `seq-mean-token-sum-norm`: sum /
            (sequences * horizon) (Dr.GRPO).
        counts: of the whole mini-batch, not of these rows.
        horizon: the constant length of the last mode, tokens; usually max_new_tokens or max_response_tokens.

    Returns:
        A scalar, float32.

    Raises:
        ValueError: unknown mode, or no horizon where one is needed.
    """
    check_aggregation(mode, horizon if mode == _NORMED else 0)
    sequences = max(counts.sequences, 1)
    if mode == "token-mean":
        return masked_sum(x, mask) / max(counts.tokens, 1)
    if mode == "seq-mean-token-mean":
        return masked_mean(x, mask, dim=1).sum() / sequences
    total = masked_sum(x, mask) / sequences
    return total if mode == "seq-mean-token-sum" else total / horizon


def check_aggregation(mode: Aggregation, horizon: int) -> None:
    """Refuse an unknown mode, and a horizon that is missing or that nothing reads."""
    known = get_args(Aggregation)
    if mode not in known:
        raise ValueError(f"aggregation={mode!r}: unknown mode. Try one of {', '.join(known)}.")
    if mode != _NORMED and horizon:
        raise ValueError(
            f"horizon={horizon} with aggregation={mode!r}: nothing reads it, only {_NORMED!r} divides by a "
            "constant length. Take that aggregation, or leave horizon at 0."
        )
    if mode == _NORMED and horizon < 1:
        raise ValueError(
            f"aggregation={mode!r} with horizon={horizon}: the sum is divided by a constant "
            "length. Set horizon to sampling.max_new_tokens, for given answers to data.max_response_tokens."
        )
