"""The verifiers of the reasoning-gym library: each of its tasks has one."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeAlias, cast

from rlhf_lightning.extras import import_extra
from rlhf_lightning.rewards.costly import has_large_power
from rlhf_lightning.rewards.functions import prompt_beginning

if TYPE_CHECKING:
    from collections.abc import Callable

    Verifier: TypeAlias = Callable[[str, dict[str, object]], float]

EVALUATED = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
"""Tasks of reasoning-gym whose verifiers evaluate an answer, by Python or sympy, without a limit of time."""


def reasoning_gym(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """Give the score of the verifier that comes with the row's task in the reasoning-gym library.

    It is 0 where the verifier would evaluate an answer with a tower of powers, a large power or factorial.

    Raises:
        ValueError: a row is not of that library, or the library is not installed.
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
        endless = task in EVALUATED and has_large_power(response)
        scores.append(0.0 if endless else float(_verifier(task)(response.strip(), row)))
    return scores


@cache
def _verifier(task: str) -> Verifier:
    """The verifier of a task: once in a process, since some read files of megabytes first."""
    gym = import_extra("reasoning_gym", extra="tasks", purpose="the reward function reasoning_gym")
    return cast("Verifier", gym.get_score_answer_fn(task))
