"""The verifiers of reasoning-gym."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import ModuleType

import pytest

from rlhf_lightning.rewards import PREFLIGHT_RESPONSE, verifiers
from rlhf_lightning.rewards.verifiers import UNASKED, reasoning_gym


def run(responses: list[str], **fields: object) -> list[float]:
    return reasoning_gym([""] * len(responses), responses, [dict(fields) for _ in responses])


@pytest.fixture
def gym() -> ModuleType:
    """The library."""
    found = pytest.importorskip("reasoning_gym")
    assert isinstance(found, ModuleType)
    return found


@pytest.mark.usefixtures("gym")
def test_rows_of_others_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no metadata\.source_dataset: answer, prompt; .*'the prompt'"):
        run(["x"], answer="x", prompt="the prompt")


POWERS = ["9**9**9**9", "9**" + "9" * 5000, "9**(9)**(9)**(9)", "((((9**20)**20)**20)**20)**20"]
POWERS += ["9**((9**99))", "factorial(9**9)"]
POWERS += ["exp(9**10)", "exp(exp(exp(23)))", "sin(exp(9**10))", "Abs(sin(exp(9**10))-1)*x", "9**0xfffffffff"]
REPEATED = ["'a'*99999999999", "'a'*99999999999!", "[0]*10**10", "1<<10**11", "[9]*(sum(range(10**10)))"]
FORMULAS = [*POWERS, *REPEATED, "1e999999999", "1.5e-999999999", "binomial(9**9, 9**8)", "prime(10**12)"]
FORMULAS += ["Integral(1, (x, 0, 1))", "(lambda: 1)()", "max(range(10**11)) != 3"]
FORMULAS += ["x!and max(range(10**11))", "x!and print('it runs')"]


ENDLESS = {
    **dict.fromkeys(("countdown", "intermediate_integration", "polynomial_multiplication"), FORMULAS),
    **dict.fromkeys(("puzzle24", "simple_integration"), FORMULAS),
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), POWERS + REPEATED),
    "coin_flip": ["1e999999999", "1E+99,999,999", "-0.5e-9_9999_9999"],
    "complex_arithmetic": ["nan", "NaN + 1i", "1 - n a ni"],
    "rubiks_cube": ["R L2 R99999999", "R' 099999999"],
    "rush_hour": ["A+99999999999", "B-1 A+0999999999999"],
}
"""Answers that a verifier evaluates for ever, in more memory than there is, as a program, or as right."""
CODE = """
import json, sys
import reasoning_gym
from rlhf_lightning.rewards.verifiers import reasoning_gym as scored
for task, endless in json.loads(sys.argv[1]).items():
    print(task, flush=True)
    row = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    answers = [*endless, "wrong", row["answer"] or (row["metadata"].get("valid_answers") or ["R2"])[0]]
    scores = scored([""] * len(answers), answers, [row] * len(answers))
    assert set(scores[:-2]) == {0.0}, (task, answers, scores)
    assert scores[-1] == 1 or task in {"rubiks_cube", "rush_hour"}, (task, answers, scores)
"""


@pytest.mark.usefixtures("gym")
def test_what_has_no_end_is_not_evaluated() -> None:
    """In a process of its own, which can be ended: a large power hears no signal."""
    assert sorted(ENDLESS) == sorted(UNASKED)
    command = [sys.executable, "-c", CODE, json.dumps(ENDLESS)]
    done = subprocess.run(command, check=True, timeout=50, capture_output=True, text=True)
    assert done.stdout.split() == [*ENDLESS]


@pytest.mark.parametrize(
    ("task", "endless"),
    [("n_queens", "sum(1 for x in range(10**12))"), ("intermediate_integration", "x**9999*(x+1)**20")],
)
def test_a_verification_that_takes_too_long_is_ended(
    task: str, endless: str, gym: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that catches all errors, as the second does."""
    row = dict(gym.create_dataset(task, size=1, seed=0)[0])
    answer = row["answer"] or row["metadata"]["valid_answers"][0]
    assert run([answer], **row) == [1]
    monkeypatch.setattr(verifiers, "TIMEOUT_S", 1)
    monkeypatch.delitem(UNASKED, task)
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    start = time.monotonic()
    assert run([endless, answer], **row) == [0, 1]
    assert time.monotonic() - start < 20, "even on a busy machine"
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


def test_polynomials_of_many_powers_are_evaluated(gym: ModuleType) -> None:
    answer = " + ".join(f"{power}*x**{power}" for power in range(2, 20))
    row = dict(gym.create_dataset("polynomial_multiplication", size=1, seed=0)[0]) | {"answer": answer}
    assert run([answer], **row) == [1]


@pytest.mark.parametrize("task", sorted(UNASKED))
def test_the_library_s_own_answers_are_no_programs(gym: ModuleType, task: str) -> None:
    """But for integrals that sympy did not find: they are read since they are the rows' own."""
    answers = [row["answer"] or "R2 U' L2" for row in gym.create_dataset(task, size=5, seed=0)]
    assert [answer for answer in answers if UNASKED[task](answer) and "Integral" not in answer] == []


def test_an_answer_that_ends_the_verifier_s_process_scores_0(
    gym: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = dict(gym.create_dataset("n_queens", size=1, seed=0)[0])
    monkeypatch.delitem(UNASKED, "n_queens")  # as a task that is not known to evaluate
    assert run(["exit()"], **row) == [0]


@dataclass
class Options:
    """Those of a task of the test's own."""

    size: int = 1
    seed: int | None = None


def test_a_task_is_made_once_not_for_each_answer(gym: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some read a file of megabytes, or of a tenth of a second, when they are made."""
    factory, dataset = gym.factory, gym.factory.ProceduralDataset
    made = list[Options]()

    class Task(dataset):  # type: ignore[misc, valid-type]
        def __init__(self, config: Options) -> None:
            super().__init__(config=config, seed=config.seed, size=config.size)
            made.append(config)

        def __getitem__(self, idx: int) -> dict[str, object]:
            return {"question": "?", "answer": "yes", "metadata": {"source_dataset": "made_once"}}

    monkeypatch.setitem(factory.DATASETS, "made_once", (Task, Options))
    row = dict(gym.create_dataset("made_once")[0])
    assert len(made) == 1
    assert run(["yes", "no", " yes"], **row) + run(["yes"], **row) == [1, 0, 1, 1]
    assert len(made) == 2


@pytest.mark.parametrize(
    ("task", "response"),
    [
        ("prime_factorization", PREFLIGHT_RESPONSE),
        ("calendar_arithmetic", "1" * 400),
        ("time_intervals", "1" * 400),
        ("boxnet", "42"),
        ("boxnet", "[[]]"),
        ("coin_flip", "1e400"),
        ("game_of_life", "{}"),
        ("n_queens", "exit()"),
    ],
)
def test_what_a_verifier_cannot_read_scores_0(gym: ModuleType, task: str, response: str) -> None:
    for row in map(dict, gym.create_dataset(task, size=20, seed=0)):
        assert run([response], **row)[0] < 0.2
        assert row["answer"] is None or run([str(row["answer"])], **row) == [1]


def test_a_row_that_is_not_the_task_s_is_named(gym: ModuleType) -> None:
    row = dict(gym.create_dataset("prime_factorization", size=1, seed=0)[0])
    with pytest.raises(ValueError, match=r"invalid literal for int\(\) with base 10: 'two'"):
        run(["6"], **row | {"answer": "two"})
    cube = dict(gym.create_dataset("rubiks_cube", size=1, seed=0)[0])
    with pytest.raises(KeyError, match="cube_size"):
        run(["R L"], **cube | {"metadata": {"source_dataset": "rubiks_cube"}})
