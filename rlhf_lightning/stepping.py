"""Runs the step of an iteration, and says what was meant where it asks for what is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from lightning.pytorch import LightningModule

from rlhf_lightning.controller import Batch, CallReport, Metrics
from rlhf_lightning.controller.register import methods_of
from rlhf_lightning.names import meant
from rlhf_lightning.workers import (
    LEARNING,
    Actor,
    Cost,
    Critic,
    Opponent,
    Reference,
    Reward,
    Role,
    Scorer,
)

_KINDS = (Actor, Opponent, Critic, Reference, Reward, Cost, Scorer)
"""Roles that a field may hold."""
_ROLES = {kind.__name__.lower(): kind.__name__ for kind in _KINDS}
"""Kinds of roles by the names that fields of them usually have."""


def run_step(by: str, step: Callable[[Batch], object], rows: Batch) -> Metrics:
    """Run an algorithm's `step` and return its metrics; the step may also return a mapping of numbers.

    Args:
        by: name of the algorithm, for errors.
        step: the algorithm's method.
        rows: batch of the iteration.

    Raises:
        TypeError: it returns neither.
        ValueError: it calls a role that its algorithm does not have, or a method that another role has.
        RuntimeError: it let StopIteration pass, which Lightning would take for the end of the data, for ever.
    """
    try:
        metrics = step(rows)
    except AttributeError as err:
        if told := _lacking(err.obj, err.name or ""):
            raise ValueError(f"{by}.step: {told}") from err
        raise
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


def advise(exception: BaseException) -> None:
    """Add a note on what was meant where a hook asked for a role, or a call of one, that there is not."""
    if isinstance(exception, AttributeError) and (told := _lacking(exception.obj, exception.name or "")):
        exception.add_note(told)


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


def _lacking(owner: object, name: str) -> str:
    """What to do where an algorithm has no such role, or a role no such method; empty of anything else."""
    if isinstance(owner, LightningModule) and name in _ROLES:
        return _undeclared(owner, name)
    if not isinstance(owner, Role):
        return ""
    calls = _calls_of(type(owner))
    whose = [kind.__name__ for kind in _KINDS if name in _calls_of(kind)]
    near = get_close_matches(name, calls, n=1, cutoff=0.75)
    if not whose and not near:
        return ""
    of = f", a call of {' and '.join(whose)}" if whose else ""
    told = f"{type(owner).__name__} has no {name}{of}.{meant(*near)} Its calls are {', '.join(calls)}."
    if name != "generate_sequences":
        return told
    return (
        f"{told} A model that draws and does not learn is an Opponent: `opponent: Opponent = "
        "field(default_factory=Opponent)`."
    )


def _calls_of(kind: type[Role]) -> list[str]:
    """The calls of a kind of role, without those that all have and those that it refuses."""
    refused = LEARNING if issubclass(kind, Opponent) else frozenset()
    return [call for call in methods_of(kind) if call not in methods_of(Role) and call not in refused]


def _undeclared(algorithm: LightningModule, name: str) -> str:
    """That it has no such role, and how it gets one."""
    has = [role for role, value in vars(algorithm).items() if isinstance(value, Role)]
    return (
        f"self.{name} is not a role of it, which has {', '.join(has)}. Write `{name}: {_ROLES[name]} = "
        f"field(default_factory={_ROLES[name]})` in the class."
    )
