"""Scoring a batch with reward functions, and trying the functions out before any worker starts."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from rlhf_lightning.rewards.http import Service, ServiceError
from rlhf_lightning.rewards.registry import check_parameters, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_lightning.rewards.spec import RewardSpec

T = TypeVar("T")
SCORES = "scores"
PREFLIGHT_ROWS = 3
PREFLIGHT_OTHERS = 8
PREFLIGHT_RESPONSE = "The answer is 42."
LARGEST = (2 - 2**-23) * 2.0**127
"""Largest number in float32, the type of columns of scores."""


def score(
    spec: RewardSpec, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[dict[str, object]]
) -> dict[str, list[float]]:
    """Score responses with the functions of a reward or cost; a model's score is not in it.

    Args:
        spec: the functions and their weights.
        prompts: the texts that the model read.
        responses: the texts that it wrote.
        rows: the raw rows; each function is given copies, one for each response.

    Returns:
        `scores`, the weighted sums, and a list under each function's name: its unweighted scores, NaN at rows
        that it does not score.

    Raises:
        ValueError: a function failed, or returned the wrong number of scores, or one that is not finite.
    """
    weights = [spec.weights(row) for row in rows]
    columns = {SCORES: [0.0] * len(rows)}
    for name in spec.names():
        picked = [index for index, functions in enumerate(weights) if name in functions]
        column = [math.nan] * len(rows)
        texts = [prompts[i] for i in picked], [responses[i] for i in picked]
        own = [deepcopy(rows[i]) for i in picked]  # a function may write; answers to one prompt share a row
        values = _call(spec, name, *texts, own) if picked else []
        for index, value in zip(picked, values, strict=True):
            column[index] = _finite(f"{spec.kind} function {name}", value, index, prompts[index])
            columns[SCORES][index] += weights[index][name] * column[index]
        columns[name] = column
    for index, total in enumerate(columns[SCORES]):
        _finite(f"{spec.kind}, the weighted sum", total, index, prompts[index])
    return columns


def preflight(spec: RewardSpec, rows: Sequence[dict[str, object]]) -> None:
    """Run the functions on a few rows of each data source, `tried_rows`, with a made-up response.

    A service is asked once, without a second try, so that a dead one is refused at once.

    Args:
        spec: the functions and their weights.
        rows: rows of the data, each with `prompt` and `data_source`.

    Raises:
        ValueError: a function does not exist, takes something else, or does not work on these rows.
    """
    once = replace(spec, http=replace(spec.http, retries=0))
    for name in spec.names():
        check_parameters(resolve(name, kind=spec.kind), what=f"{spec.kind} function {name!r}")
    for picked in tried_rows(rows):
        prompts = [str(row.get("prompt", "")) for row in picked]
        score(once, prompts, [PREFLIGHT_RESPONSE] * len(picked), picked)


def find(spec: RewardSpec) -> None:
    """Import the functions here, on a worker, and read the variables of services: this may be another node.

    Raises:
        ValueError: a function is not found, or a variable not set.
    """
    for name in spec.names():
        function = resolve(name, kind=spec.kind, http=spec.http)
        if isinstance(function, Service):
            function.headers()


def tried_rows(rows: Sequence[dict[str, object]]) -> list[list[dict[str, object]]]:
    """Rows on which to try a function, those of each call in a list.

    The first ones of each data source; and by itself, so that an error is about it, the first row of each
    other set of fields that are there and not null, up to `PREFLIGHT_OTHERS` of a data source.
    """
    first: defaultdict[str, list[dict[str, object]]] = defaultdict(list)
    others: defaultdict[str, list[dict[str, object]]] = defaultdict(list)
    seen: set[tuple[str, frozenset[str]]] = set()
    for row in rows:
        source = str(row.get("data_source", ""))
        fields = source, frozenset(name for name, value in row.items() if value is not None)
        if len(first[source]) < PREFLIGHT_ROWS:
            first[source].append(row)
        elif fields not in seen and len(others[source]) < PREFLIGHT_OTHERS:
            others[source].append(row)
        seen.add(fields)
    return [*first.values(), *([row] for found in others.values() for row in found)]


def _call(
    spec: RewardSpec, name: str, prompts: list[str], responses: list[str], rows: list[dict[str, object]]
) -> list[object]:
    function, whose = resolve(name, kind=spec.kind, http=spec.http), f"{spec.kind} function {name}"
    try:
        return items(function, prompts, responses, rows, whose=whose, each="one number for each response")
    except ServiceError as err:
        raise ValueError(f"{spec.kind} function {err}") from err


def items(
    function: Callable[[list[str], list[str], list[dict[str, object]]], object],
    prompts: list[str],
    responses: list[str],
    rows: list[dict[str, object]],
    *,
    whose: str,
    each: str,
) -> list[object]:
    """What a function of rewards or of an environment returns, an item for each row; it may be `async`.

    Args:
        function: of the user, or a service.
        prompts: the texts that the model read.
        responses: the texts that it wrote.
        rows: the raw rows; the function may write into them.
        whose: what the function is, for messages.
        each: what it has to return, for messages.

    Raises:
        ServiceError: a service gave no scores.
        ValueError: the function failed, or did not return a list with an item for each row.
    """
    first, had = f"the first with the prompt {prompts[0][:60]!r}", [frozenset(row) for row in rows]
    try:
        given = function(prompts, responses, rows)
        found: object = _awaited(given) if isinstance(given, Awaitable) else given
        returned = _listed(found)
    except ServiceError:
        raise
    except (Exception, SystemExit) as err:
        has = f". {_lacking(err, prompts, had)}" if isinstance(err, KeyError) else ""
        raise ValueError(f"{whose}: {type(err).__name__} over {len(rows)} rows, {first}: {err}{has}") from err
    if returned is None:
        raise ValueError(
            f"{whose}: returned {repr(found)[:60]}, of type {type(found).__name__}, {first}. Return a list "
            f"of {each}."
        )
    if len(returned) != len(rows):
        raise ValueError(
            f"{whose}: returned a list of {len(returned)} for {len(rows)} rows, {first}. Return {each}."
        )
    return returned


def _lacking(err: KeyError, prompts: list[str], had: Sequence[frozenset[str]]) -> str:
    """Which rows have no such field, or what rows have, if that is no field of one."""
    found = [number for number, fields in enumerate(had) if err.args and err.args[0] not in fields]
    if not 0 < len(found) < len(had):
        return f"Rows have: {', '.join(sorted(had[0]))}."
    return (
        f"{len(found)} of {len(had)} rows have no such field, the first of them with the prompt "
        f"{prompts[found[0]][:60]!r}; it has: {', '.join(sorted(had[found[0]]))}. "
        "Complete or remove these rows."
    )


def _listed(found: object) -> list[object] | None:
    """The items of what a function returned; None if it is one thing, such as a text or a mapping."""
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping):
        return None
    return list(found)


def _awaited(coming: Awaitable[T]) -> T:
    """Wait for the result of an `async def`.

    A process has one loop for all of them, on a thread of its own: clients and semaphores of a module belong
    to the loop in which they are first used, and in a notebook the calling thread already runs a loop.
    """

    async def come() -> T:
        try:
            return await coming
        except SystemExit as err:  # would end the loop for all
            raise RuntimeError(f"sys.exit({err})") from err

    return asyncio.run_coroutine_threadsafe(come(), _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


def _finite(whose: str, value: object, number: int, prompt: str) -> float:
    try:
        result = math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
        result = math.nan
    if not abs(result) <= LARGEST:
        raise not_finite(
            whose,
            value,
            number,
            prompt=prompt,
            advice="Return a number, 0.0 where a response cannot be scored.",
        )
    return result


def not_finite(whose: str, value: object, number: int, *, prompt: str, advice: str) -> ValueError:
    """The error of a score that is not a finite number.

    Args:
        whose: function or model that gave it.
        value: that it gave.
        number: of the row in the batch.
        prompt: of the row.
        advice: what to do instead.
    """
    return ValueError(
        f"{whose}: row {number} of the batch got {repr(value)[:60]}, which is not a finite number; "
        f"its prompt begins {prompt[:60]!r}. {advice}"
    )
