"""What an algorithm with a critic keeps between iterations (KL weight, running moments), its early stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.field_types import check_types
from rlhf_lightning.functional import GAEEstimator, KLKind, adapted_kl_coef, masked_sum, mean_std, merged

_TOTALS = ("row_returns", "row_squares", "row_tokens")
"""Columns of an estimator of which the running moments of returns are made."""


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """The divergence from the reference, in the reward (Ziegler 2019, section 2.2)."""

    coef: float = 0.05
    """Weight of the penalty; where it starts, if it adapts."""
    estimator: KLKind = "k1"
    """Which estimate of the divergence, as in `kl_estimate`."""
    target: float | None = None
    """Divergence that the weight is steered to, nats per token; None keeps it fixed."""
    horizon: float = 10_000.0
    """Rows over which a constant error of 20% changes the weight by about 20%."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.coef < 0:
            raise ValueError(f"kl.coef={self.coef}: a penalty is not negative. Try 0.05, or 0 for none.")
        if self.horizon <= 0:
            raise ValueError(f"kl.horizon={self.horizon}: is a number of rows, above 0. Try 10000.")
        if self.target is not None:
            if not self.coef:
                raise ValueError(
                    f"kl.target={self.target} with kl.coef={self.coef}: the weight adapts by a factor, and "
                    "0 stays 0. Try kl.coef 0.05, or leave kl.target out."
                )
            self.adapted(self.coef, current=self.target, num_rows=1)

    def adapted(self, coef: float, *, current: float, num_rows: int) -> float:
        """The weight of the next iteration; see `adapted_kl_coef`."""
        if self.target is None:
            return coef
        return adapted_kl_coef(
            coef, current=current, target=self.target, horizon=self.horizon, num_rows=num_rows
        )


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Normalisation of scores and values by running statistics."""

    rewards: bool = False
    """Divide scores by their running standard deviation."""
    reward_clip: float | None = None
    """Limit scores to +- this, after the division."""
    values: bool = False
    """Train the critic on returns that are scaled to running mean 0 and variance 1."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.reward_clip is not None and self.reward_clip <= 0:
            raise ValueError(f"scaling.reward_clip={self.reward_clip}: must be above 0. Try 5.0, or None.")


class Running(nn.Module):
    """The weight of the KL penalty, and the running moments of scores and returns, float64 [3] each."""

    kl_coef: torch.Tensor
    scores: torch.Tensor
    returns: torch.Tensor

    def __init__(self, kl: KLPenalty, scaling: Scaling) -> None:
        super().__init__()
        self._kl, self._scaling = kl, scaling
        self.register_buffer("kl_coef", torch.tensor(kl.coef, dtype=torch.float64))
        self.register_buffer("scores", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("returns", torch.zeros(3, dtype=torch.float64))

    @property
    def coef(self) -> float:
        """The current KL weight; that of the option if it is fixed, or was 0 in the checkpoint."""
        return self._kl.coef if self._kl.target is None else float(self.kl_coef) or self._kl.coef

    def fitted(self, estimator: GAEEstimator, batch: Batch, *, learn: bool) -> GAEEstimator:
        """The estimator with the current KL weight and normalisation.

        Args:
            estimator: the estimator to complete.
            batch: its scores are added to the running moments first, where scores are normalised.
            learn: whether to add them: True in training only.
        """
        scaling = self._scaling
        found = replace(
            estimator,
            kl_coef=self.coef,
            kl_estimator=self._kl.estimator,
            score_clip=scaling.reward_clip,
        )
        if scaling.rewards:
            if learn:
                outcomes = masked_sum(batch["scores"].double(), batch["response_mask"], dim=1)
                self.scores.copy_(merged(self.scores, outcomes.sum(), outcomes.square().sum(), len(batch)))
            found = replace(found, score_scale=1 / mean_std(self.scores)[1])
        if scaling.values:
            mean, std = mean_std(self.returns)
            found = replace(found, value_mean=mean, value_std=std)
        return found

    def learn(self, batch: Batch, *, kl: float | None) -> None:
        """Adapt the KL weight, and add the estimator's returns to the running moments.

        Args:
            batch: with the columns that `GAEEstimator` adds, or those that the options read.
            kl: KL divergence of this iteration, nats per token; None where the estimator measures none.

        Raises:
            ValueError: an option reads a column that an estimator of the user's own does not return.
        """
        if kl is None and self._kl.target is not None:
            _check_returned(batch, ("row_kl",), option=f"kl.target={self._kl.target}")
        if kl is not None:
            self.kl_coef.fill_(self._kl.adapted(self.coef, current=kl, num_rows=len(batch)))
        if self._scaling.values:
            _check_returned(batch, _TOTALS, option="scaling.values=true")
            totals = (batch[name].double().sum() for name in _TOTALS)
            self.returns.copy_(merged(self.returns, *totals))


def _check_returned(batch: Batch, columns: Sequence[str], *, option: str) -> None:
    if missing := [name for name in columns if name not in batch]:
        raise ValueError(
            f"{option}: reads {', '.join(missing)}, which the estimator does not return. Return what "
            f"GAEEstimator does, or leave {option.partition('=')[0]} out."
        )


def drifted(metrics: Metrics, stop_kl: float | None, mini: Batch) -> bool:
    """Whether an update has moved the actor further from the rollout's policy than it may, nats per token.

    Args:
        metrics: of the update; fetched only where there is a limit.
        stop_kl: the limit; None for none.
        mini: what it was to learn from; where no token is valid nothing has moved, and nothing is measured.

    Raises:
        ValueError: there is a limit, and the actor's loss does not measure it.
    """
    if stop_kl is None:
        return False
    measured = metrics.fetch().get("actor/approx_kl")
    if measured is None and mini["response_mask"].any():
        raise ValueError(
            f"stop_kl={stop_kl}: reads actor/approx_kl, and the actor's loss returns no such metric. Return "
            "it as PolicyLoss does, or leave stop_kl out."
        )
    return measured is not None and measured > stop_kl
