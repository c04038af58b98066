"""The verifiers of the reasoning-gym library: each of its tasks has one."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias, cast

from rlhf_lightning.extras import import_extra
from rlhf_lightning.rewards.costly import (
    has_large_scale,
    has_many_moves,
    is_costly_arithmetic,
    is_costly_formula,
    is_program,
    names_nan,
)
from rlhf_lightning.rewards.functions import prompt_beginning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Verifier: TypeAlias = Callable[[str, dict[str, object]], float]

UNASKED: dict[str, Callable[[str], bool]] = {
    "binary_matrix": is_program,
    "coin_flip": has_large_scale,
    "complex_arithmetic": names_nan,
    "countdown": is_costly_arithmetic,
    "intermediate_integration": is_costly_formula,
    "n_queens": is_program,
    "polynomial_multiplication": is_costly_formula,
    "puzzle24": is_costly_arithmetic,
    "rubiks_cube": has_many_moves,
    "rush_hour": has_many_moves,
    "simple_integration": is_costly_formula,
    "spiral_matrix": is_program,
    "string_insertion": is_program,
}
"""Tasks, and over which answers their verifiers are not asked: they could take for ever, run code, or find
right what is no number."""
TIMEOUT_S = 10.0
"""Longest verification of one answer; it ends by a signal, so in the main thread only."""
KEPT = 128
"""Verifiers that a process keeps; the library has about a hundred tasks."""


def reasoning_gym(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """Give the score of the verifier that comes with the row's task in the reasoning-gym library.

    The task has the options of the row's `task_options`, else its defaults. The score is 0 where the verifier
    fails over an answer or takes too long, and where it would evaluate one that could take for ever, or that
    may be a program.

    Raises:
        ValueError: a row is not of that library, or the library is not installed.
        Exception: what the verifier raises over the row's own answer, such as a KeyError.
    """
    del prompts
    scores = []
    for response, row in zip(responses, rows, strict=True):
        metadata = row.get("metadata")
        task = metadata.get("source_dataset") if isinstance(metadata, dict) else None
        if task is None:
            raise ValueError(
                "reasoning_gym scores rows of that library, this one has no metadata.source_dataset: "
                f"{', '.join(row)}; {prompt_beginning(row)}. Use --data ReasoningGymData, or another "
                "function."
            )
        answer = response.strip()
        if task in UNASKED and UNASKED[task](answer) and answer != _own(row):
            scores.append(0.0)
            continue
        verify = _verifier(task, json.dumps(row.get("task_options") or {}, sort_keys=True))
        scores.append(_verified(verify, answer, row))
    return scores


def _own(row: dict[str, object]) -> str:
    return str(row.get("answer") or "")


class _TimedOut(BaseException):
    """No Exception, since verifiers catch those."""


@contextmanager
def _limited() -> Iterator[None]:
    """End what takes longer than TIMEOUT_S, again each second in case that a library catches everything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise _TimedOut

    before = signal.signal(signal.SIGALRM, end)
    left = signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)


def _verified(verify: Verifier, response: str, row: dict[str, object]) -> float:
    """The verifier's score; 0 where it fails over a response, but not over the row's own answer."""
    own = _own(row)
    try:
        with _limited():
            return float(verify(response, row))
    except _TimedOut:
        return 0.0
    # A model may write anything, and a task that is not in UNASKED may evaluate `exit()`.
    except (Exception, SystemExit):
        if response == own:  # the row is not the task's
            raise
        _verified(verify, own, row)
        return 0.0


@lru_cache(maxsize=KEPT)
def _verifier(task: str, options: str) -> Verifier:
    """The verifier of a task with options, an object in JSON: kept, since some read large files first."""
    gym = import_extra("reasoning_gym", extra="tasks", purpose="the reward function reasoning_gym")
    data_set = gym.create_dataset(task, **json.loads(options) | {"size": 1, "seed": 0})
    return cast("Verifier", data_set.score_answer)
