"""An algorithm's dataflow (D in Algorithm 1): its calls, cut into stages by what each waits for.

Most algorithms have HybridFlow's three stages, generation -> preparation -> training; others get more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["generate", "infer", "train", "function"]
"""What a call does: draw sequences, one forward pass, one update; or a function, which runs no model."""

PHASES: dict[Kind, str] = {
    "generate": "generation",
    "infer": "preparation",
    "function": "preparation",
    "train": "training",
}


def kind_of(method: str) -> Kind:
    """The kind of a method, by the verb in its name: the names are those of HybridFlow's Table 4."""
    verbs: dict[str, Kind] = {"generate": "generate", "update": "train", "accumulate": "train"}
    return verbs.get(method.partition("_")[0], "infer")


@dataclass(frozen=True)
class Call:
    """One remote call of an iteration."""

    role: str
    method: str
    kind: Kind
    rows: int
    """Rows that it is given."""
    after: frozenset[int] = field(default_factory=frozenset)
    """Indices of the calls that it waits for: those that make a column that it reads, whose result the
    controller has fetched before, or that change the weights that it uses."""


@dataclass(frozen=True)
class Work:
    """What one model has to do in one stage."""

    role: str
    kind: Kind
    rows: int
    """Rows of all its calls together."""
    calls: int
    """How many calls: its updates, for training."""


@dataclass(frozen=True)
class Stage:
    """Work of several models that runs side by side where they have devices of their own."""

    name: str
    work: tuple[Work, ...]


@dataclass(frozen=True)
class Dataflow:
    """One iteration: stages, one after another."""

    stages: tuple[Stage, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """The models that work, in the order of their first call; functions need no devices."""
        work = [work for stage in self.stages for work in stage.work]
        return tuple(dict.fromkeys(w.role for w in work if w.kind != "function"))

    def kinds(self, role: str) -> frozenset[Kind]:
        """The kinds of work of a model."""
        return frozenset(w.kind for stage in self.stages for w in stage.work if w.role == role)

    @property
    def rows(self) -> int:
        """Rows of an iteration, for throughput: generated ones, or those trained on if fewer or alone."""
        made = sum(w.rows for s in self.stages for w in s.work if w.kind == "generate")
        learnt = [w.rows for s in self.stages for w in s.work if w.kind == "train"]
        return min([made, *learnt] if made else learnt, default=0)


def dataflow_of(calls: Sequence[Call]) -> Dataflow:
    """The stages of calls, given in program order.

    A call comes at least one stage after each call that it waits for, unless that is a call of the same model
    in the same phase: these may share a stage, since the model's devices run them in turn.
    """
    phases: list[str] = []
    stage_of: list[int] = []
    for call in calls:
        phase = PHASES[call.kind]
        earliest = 0
        for index in call.after:
            before = calls[index]
            shares = before.role == call.role and PHASES[before.kind] == phase
            earliest = max(earliest, stage_of[index] + (not shares))
        later = (i for i in range(earliest, len(phases)) if phases[i] == phase)
        stage = next(later, len(phases))
        if stage == len(phases):
            phases.append(phase)
        stage_of.append(stage)
    cut = [[c for c, at in zip(calls, stage_of, strict=True) if at == i] for i in range(len(phases))]
    return Dataflow(tuple(Stage(n, _work(c)) for n, c in zip(_numbered(phases), cut, strict=True)))


def _work(calls: Iterable[Call]) -> tuple[Work, ...]:
    rows: Counter[tuple[str, Kind]] = Counter()
    number: Counter[tuple[str, Kind]] = Counter()
    for call in calls:
        rows[call.role, call.kind] += call.rows
        number[call.role, call.kind] += 1
    return tuple(Work(role, kind, rows[role, kind], n) for (role, kind), n in number.items())


def _numbered(names: Sequence[str]) -> list[str]:
    """The names, with a number where one has come before: training, training 2."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return result
