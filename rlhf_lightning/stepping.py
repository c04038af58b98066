"""Runs the step of an iteration, and refuses what it must not return or leave behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlhf_lightning.controller import Batch, CallReport, Metrics


def run_step(by: str, step: Callable[[Batch], object], rows: Batch) -> Metrics:
    """Run an algorithm's `step` and return its metrics; the step may also return a mapping of numbers.

    Raises:
        TypeError: it returns neither.
        RuntimeError: it let StopIteration pass, which Lightning would take for the end of the data, for ever.
    """
    try:
        metrics = step(rows)
    except StopIteration as err:
        raise RuntimeError(
            f"{by}.step took from an iterator that had come to its end (StopIteration)."
        ) from err
    if isinstance(metrics, Metrics):
        return metrics
    if isinstance(metrics, Mapping):
        return Metrics.of(metrics)
    raise TypeError(
        f"{by}.step returned a {type(metrics).__name__}. Return what the updates returned, joined by |, or "
        "Metrics.of({...})."
    )


def finished(reports: Sequence[CallReport]) -> Sequence[CallReport]:
    """The reports of an iteration's calls, after which no role may hold a gradient that no step has taken.

    Raises:
        ValueError: one does: a step of later rows would take it, and a run that goes on would not have it.
    """
    last = {(report.role, report.rank): report.left for report in reports}  # a device reports in order
    if held := sorted(role for (role, _), left in last.items() if left):
        raise ValueError(
            f"{held[0]}: the iteration ends with a gradient that was accumulated and that no update has "
            "taken: it would go into a step of later rows, and into no checkpoint. Accumulate only where an "
            "update follows within the iteration, so not while PPO's actor waits (self.actor_paused is "
            "True). For steps of more rows type a larger --data.batch_size."
        )
    return reports
