"""An iteration: the rows that a loader gave, the step over them, and what it must not return or leave."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule

from rlhf_lightning.controller import Batch, Caller, CallReport, Metrics
from rlhf_lightning.controller.block import Values
from rlhf_lightning.workers import ReadingActor

if TYPE_CHECKING:
    from rlhf_lightning.algorithm import RLHFAlgorithm

logger = logging.getLogger(__name__)


def is_own(method: Callable[..., object]) -> bool:
    """Whether the user wrote a method; a `step` may then make columns, and read what those here do not."""
    return not method.__module__.startswith(f"{__package__}.")


def rows_of(algorithm: RLHFAlgorithm, batch: Mapping[str, Values]) -> Batch:
    """The rows that a loader gave: columns by name, among them prompts.

    Raises:
        ValueError: there are no prompts, and no step of the user's own that may do without, or make them.
        TypeError: it has no columns.
    """
    given: object = batch  # a plain DataLoader may yield anything
    if isinstance(given, Mapping) and not is_own(type(algorithm).step):
        check_encoded(algorithm, given, what="a batch")
    return Batch.of(batch)


def with_ptx(algorithm: RLHFAlgorithm, batch: Mapping[str, Values]) -> tuple[Batch, Batch | None]:
    """The rows of an iteration, and its pre-training rows where MixedData puts some under the key `ptx`.

    Raises:
        ValueError: there are no prompts, as `rows_of` says.
        TypeError: there are no columns.
    """
    given: object = batch
    ptx = given.get("ptx") if isinstance(given, Mapping) else None
    if not isinstance(ptx, Mapping):
        return rows_of(algorithm, batch), None
    return rows_of(algorithm, {name: batch[name] for name in batch if name != "ptx"}), Batch.of(ptx)


def check_encoded(algorithm: RLHFAlgorithm, columns: Iterable[str], *, what: str) -> None:
    """Refuse columns without prompts, such as those of raw rows.

    Args:
        algorithm: that is to read them.
        columns: their names.
        what: has them, for the message.
    """
    if "prompt_ids" not in columns:
        reading = "PreferenceData" if algorithm.needs_pairs else "CompletionData"
        kind = reading if algorithm.reads_only else "PromptData"
        raise ValueError(
            f"{what} has the columns {sorted(map(str, columns))}, and no 'prompt_ids': data modules encode "
            f"rows and make batches of them. Type trainer.fit(..., datamodule={kind}.from_rows(rows, "
            "batch_size=16))."
        )


def warn_of_doubles(algorithm: RLHFAlgorithm, rows: Batch) -> None:
    """Say once where rows of a batch have one row id, by which answers are drawn."""
    draws = not algorithm.reads_only and "actor" in algorithm.roles()
    if algorithm.told_of_doubles or not draws or "row_ids" not in rows:
        return
    ids, times = rows["row_ids"].unique(return_counts=True)
    if len(ids) < len(rows):
        algorithm.told_of_doubles = True
        logger.warning(
            "%d of the %d rows of a batch have the row id of another, such as %d, and its answers: "
            "let the sampler yield keys n << 32 | index, with another n each time that it draws a row.",
            *(len(rows) - len(ids), len(rows), ids[times > 1][0]),
        )


def refusing_draws(algorithm: RLHFAlgorithm, callers: Mapping[str, Caller]) -> Mapping[str, Caller]:
    """What receives the calls on each role's handle, where a step that only reads answers must draw none."""
    if not algorithm.reads_only or "actor" not in callers:
        return callers
    kind = type(algorithm)
    hooks = {"training_step": "step"}
    if kind.on_train_start is not LightningModule.on_train_start:  # else callbacks alone may draw there
        hooks["on_train_start"] = "on_train_start"

    def drawing() -> str:
        hook = hooks.get(algorithm._current_fx_name or "")
        return f"{kind.__name__}.{hook}" if hook else ""

    return {**callers, "actor": ReadingActor(drawing, callers["actor"])}


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
