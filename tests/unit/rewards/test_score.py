"""RewardSpec, score and preflight."""

from __future__ import annotations

import asyncio
import math
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from jsonargparse import ArgumentParser

from rlhf_lightning.rewards import REWARDS, Functions, RewardSpec, preflight, resolve, score
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.workers import Cost, Reward

Row = dict[str, object]


def row(source: str = "a", **fields: object) -> Row:
    return {"prompt": f"prompt of {source}", "data_source": source, "answer": "yes"} | fields


def scored(spec: RewardSpec, responses: list[str], rows: list[Row]) -> dict[str, list[float]]:
    return score(spec, [str(one["prompt"]) for one in rows], responses, rows)


@pytest.fixture
def mine() -> Iterator[ModuleType]:
    """A user's module with reward functions."""
    module = ModuleType("my_rewards")
    sys.modules["my_rewards"] = module
    yield module
    del sys.modules["my_rewards"]


def test_weighted_sum_of_functions() -> None:
    spec = RewardSpec(functions={"exact_match": 2.0, "length": -0.5})
    got = scored(spec, ["yes", "x" * 128, ""], [row(), row(), row()])
    assert got["exact_match"] == [1.0, 0.0, 0.0]
    assert got["length"] == [3 / 256, 0.5, 0.0]
    assert got["scores"] == [2.0 - 0.5 * 3 / 256, -0.25, 0.0]


def test_functions_by_data_source(mine: ModuleType) -> None:
    seen = []

    def count(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
        seen.append((prompts, responses, [one["data_source"] for one in rows]))
        return [10.0 + len(response) for response in responses]

    vars(mine)["count"] = count
    spec = RewardSpec(functions="exact_match", by_source={"b": {"my_rewards.count": 0.5}})
    got = scored(spec, ["yes", "12", "no", "1"], [row("a"), row("b"), row("c"), row("b")])
    assert seen == [(["prompt of b", "prompt of b"], ["12", "1"], ["b", "b"])]
    assert got["scores"] == [1.0, 6.0, 0.0, 5.5]
    assert [math.isnan(value) for value in got["exact_match"]] == [False, True, False, True]
    assert [math.isnan(value) for value in got["my_rewards.count"]] == [True, False, True, False]


def test_no_rows_have_no_scores() -> None:
    assert scored(RewardSpec(functions=["exact_match", "length"]), [], []) == {
        "scores": [],
        "exact_match": [],
        "length": [],
    }


def test_what_scores_where_nothing_is_said() -> None:
    assert RewardSpec().names() == ["exact_match"]
    assert RewardSpec(model=ModelSpec()).names() == []
    assert RewardSpec(by_source={"a": {"length": 1.0}}).names() == ["length"]
    assert scored(RewardSpec(model=ModelSpec()), ["x"], [row()]) == {"scores": [0.0]}
    with pytest.raises(ValueError, match="no function scores the data source 'b'; by_source has: a"):
        scored(RewardSpec(by_source={"a": {"length": 1.0}}), ["x"], [row("b")])
    with pytest.raises(ValueError, match="length has the weight nan"):
        RewardSpec(functions={"length": math.nan})


def test_a_cost_has_no_default_and_is_called_a_cost() -> None:
    nothing: list[Functions] = [None, []]
    for functions in nothing:
        with pytest.raises(ValueError, match=r"cost: no function scores the data source 'b'; .*has: nothing"):
            scored(RewardSpec(kind="cost", functions=functions), ["x"], [row("b")])
    assert RewardSpec(kind="cost", model=ModelSpec()).names() == []
    assert RewardSpec(kind="cost", by_source={"a": {"too_long": 1.0}}).names() == ["too_long"]
    with pytest.raises(ValueError, match="cost functions: too_long has the weight inf"):
        RewardSpec(kind="cost", functions={"too_long": math.inf})
    with pytest.raises(ValueError, match="cost: no function scores the data source 'b'"):
        scored(RewardSpec(kind="cost", by_source={"a": {"too_long": 1.0}}), ["x"], [row("b")])
    with pytest.raises(ValueError, match="cost function too_long: ValueError over 1 rows"):
        scored(RewardSpec(kind="cost", functions="too_long"), ["x"], [{"prompt": "p"}])
    with pytest.raises(ValueError, match="cost function 'too_lon': it is not a short name"):
        preflight(RewardSpec(kind="cost", functions="too_lon"), [row()])


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "many", "1.0", 10**400, 1e39])
def test_score_that_is_no_number_names_the_row(mine: ModuleType, value: object) -> None:
    vars(mine)["broken"] = lambda _prompts, responses, _rows: [0.0] * (len(responses) - 1) + [value]
    spec = RewardSpec(by_source={"a": {"length": 1.0}, "b": {"my_rewards.broken": 1.0}})
    with pytest.raises(ValueError, match="not a finite number") as error:
        scored(spec, ["x", "x", "x"], [row("b"), row("a"), row("b", prompt="the third" + "." * 100)])
    assert f"reward function my_rewards.broken: row 2 of the batch got {repr(value)[:60]}, which" in str(
        error.value
    )
    assert "its prompt begins 'the third..." in str(error.value)


def test_a_sum_that_is_no_number_names_the_row(mine: ModuleType) -> None:
    vars(mine)["large"] = lambda _prompts, responses, _rows: [3e38] * len(responses)
    spec = RewardSpec(functions={"my_rewards.large": 2.0})
    with pytest.raises(ValueError, match=r"reward, the weighted sum: row 0 of the batch got 6e\+38, which"):
        scored(spec, ["x"], [row()])


def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text, why in [
        ("half_written", "def f(:", r"SyntaxError: .*"),
        ("without_file", "open('/nowhere/at/all')", r"FileNotFoundError: .*/nowhere/at/all.*"),
    ]:
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ValueError, match=rf"'{name}\.f': {name} could not be imported \({why}\)"):
            preflight(RewardSpec(functions=f"{name}.f"), [row()])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("open('/nowhere/at/all')", "FileNotFoundError: .*/nowhere/at/all.*"),
    ],
)
def test_a_package_that_fails_is_not_one_that_is_missing(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "__init__.py").write_text(text)
    (tmp_path / "unfinished" / "inside.py").touch()
    with pytest.raises(ValueError, match=rf"'unfinished\.inside\.f': .* could not be imported \({why}\)"):
        resolve("unfinished.inside.f")


def test_a_function_that_is_named_twice() -> None:
    with pytest.raises(ValueError, match=r"reward\.functions: length is named 2 times.*\{length: 2\.0\}"):
        RewardSpec(functions=["length", "exact_match", "length"])
    with pytest.raises(ValueError, match=r"reward\.by_source: length is named 2 times"):
        RewardSpec(by_source={"a": ["length", "length"]})


def test_wrong_number_of_scores(mine: ModuleType) -> None:
    vars(mine)["short"] = lambda _prompts, _responses, _rows: [1.0]
    with pytest.raises(ValueError, match=r"my_rewards\.short: returned a list of 1 for 2 rows, .*'prompt of"):
        scored(RewardSpec(functions="my_rewards.short"), ["x", "y"], [row(), row()])


def test_exception_in_a_function_is_named(mine: ModuleType) -> None:
    vars(mine)["failing"] = lambda _prompts, _responses, rows: [one["nowhere"] for one in rows]
    with pytest.raises(
        ValueError,
        match=r"my_rewards\.failing: KeyError over 1 rows, .*'nowhere'\. "
        r"Rows have: answer, data_source, prompt\.$",
    ) as error:
        scored(RewardSpec(functions="my_rewards.failing"), ["x"], [row()])
    assert isinstance(error.value.__cause__, KeyError)


def test_a_function_that_ends_the_process_fails(mine: ModuleType) -> None:
    def leave(_prompts: list[str], _responses: list[str], _rows: list[Row]) -> list[float]:
        raise SystemExit(0)

    vars(mine)["leave"] = leave
    with pytest.raises(ValueError, match=r"my_rewards\.leave: SystemExit over 1 rows"):
        scored(RewardSpec(functions="my_rewards.leave"), ["x"], [row()])


def test_what_preflight_hands_out_may_be_written_to(mine: ModuleType) -> None:
    def spoil(_prompts: list[str], _responses: list[str], rows: list[Row]) -> list[float]:
        for one in rows:
            one["answer"] = "spoilt"
        return [0.0] * len(rows)

    vars(mine)["spoil"] = spoil
    rows = [row()]
    before = dict(rows[0])
    preflight(RewardSpec(functions="my_rewards.spoil"), rows)
    assert rows == [before]


def test_tensors_and_arrays_are_numbers_too(mine: ModuleType) -> None:
    vars(mine)["tensor"] = lambda _prompts, _responses, _rows: torch.tensor([1.5, 2.0])
    assert scored(RewardSpec(functions="my_rewards.tensor"), ["x", "y"], [row(), row()])["scores"] == [
        1.5,
        2.0,
    ]


def test_preflight_tries_every_source_once(mine: ModuleType) -> None:
    calls = []

    def note(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
        calls.append([one["data_source"] for one in rows])
        return [float("nan") if one["data_source"] == "late" else 0.0 for one in rows]

    vars(mine)["note"] = note
    rows = [row("a") for _ in range(9)] + [row("b")]
    preflight(RewardSpec(functions="my_rewards.note"), rows)
    assert calls == [["a", "a", "a"], ["b"]]
    with pytest.raises(ValueError, match="row 0 of the batch got nan"):
        preflight(RewardSpec(functions="my_rewards.note"), [*rows, row("late")])
    with pytest.raises(ValueError, match="Short names") as error:
        preflight(RewardSpec(by_source={"z": {"nothing": 1.0}}, functions="length"), rows)
    assert "nothing" in str(error.value)
    with pytest.raises(
        ValueError, match="exact_match compares with the row's field 'answer', this row has: prompt"
    ):
        preflight(RewardSpec(), [{"prompt": "p", "data_source": "a"}])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "it is not a short name"),
        ("nowhere.at.all", "there is no module 'nowhere.at'"),
        ("math.nothing", "the module math defines no 'nothing'"),
        ("math.pi", "it is of type float, which cannot be called"),
    ],
)
def test_unknown_function_lists_the_known(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        resolve(name)
    assert name == "math.pi" or ", ".join(REWARDS) in str(error.value)
    assert resolve("exact_match") is REWARDS["exact_match"]


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("def f(prompts, completions, answer, **kwargs): ...", "where 'completions' is another system's"),
        ("def f(completions, **kwargs): ...", r"it takes \(completions, \*\*kwargs\)\. It is called with"),
        ("def f(data_source, solution_str, ground_truth, extra_info=None): ...", "where 'data_source' is"),
        ("def f(queries, prompts, labels, **kwargs): return [1.0] * len(queries)", "where 'queries' is"),
        ("def f(prompts, responses): ...", r"\(prompts, responses, rows\) -> scores"),
        ("def f(): ...", r"row\['answer'\]"),
    ],
)
def test_functions_of_other_systems_are_told_apart(mine: ModuleType, definition: str, message: str) -> None:
    exec(definition, vars(mine))  # noqa: S102
    with pytest.raises(ValueError, match=message):
        preflight(RewardSpec(functions="my_rewards.f"), [row()])


@pytest.mark.parametrize(
    "definition",
    [
        "def f(p, r, rows, scale=1.0): return [scale] * len(rows)",
        "def f(*lists): return [1.0] * len(lists[0])",
        "class Mine:\n  def __call__(self, p, r, rows): return [1.0] * len(rows)\nf = Mine()",
    ],
)
def test_parameters_have_any_other_name(mine: ModuleType, definition: str) -> None:
    exec(definition, vars(mine))  # noqa: S102
    preflight(RewardSpec(functions="my_rewards.f"), [row()])
    assert scored(RewardSpec(functions="my_rewards.f"), ["a"], [row()])["scores"] == [1.0]


def parse(*arguments: str) -> RewardSpec:
    """The reward that options of a command line give."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=RewardSpec, default=RewardSpec())
    spec = parser.instantiate(parser.parse_args(list(arguments))).reward
    assert isinstance(spec, RewardSpec)
    return spec


def test_options_from_the_command_line() -> None:
    assert parse().names() == ["exact_match"]
    assert parse("--reward.functions", "length").weights({}) == {"length": 1.0}
    assert parse("--reward.functions", "[length, exact_match]").weights({}) == {
        "length": 1.0,
        "exact_match": 1.0,
    }
    assert parse("--reward.functions", "{length: 0.5, my.own: 2}").weights({}) == {
        "length": 0.5,
        "my.own": 2.0,
    }
    by_source = parse("--reward", '{"by_source": {"gsm8k": {"maths_answer": 1.0}}}')
    assert by_source.weights({"data_source": "gsm8k"}) == {"maths_answer": 1.0}
    assert parse("--reward.model.path", "some/model").model == ModelSpec(path="some/model")


def test_functions_of_a_data_source_are_written_as_those_of_all() -> None:
    by_source = parse("--reward.by_source", "{a: {length: 2.0}, b: length, c: [length, exact_match]}")
    assert by_source.weights({"data_source": "a"}) == {"length": 2.0}
    assert by_source.weights({"data_source": "b"}) == {"length": 1.0}
    assert by_source.weights({"data_source": "c"}) == {"length": 1.0, "exact_match": 1.0}
    assert by_source.names() == ["length", "exact_match"]


def as_given(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """A user's reward, to be given itself."""
    return [float(len(response)) for response in responses]


async def awaited(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """The same, from something to wait for."""
    await asyncio.sleep(0)
    return as_given(prompts, responses, rows)


HERE = f"{__name__}.as_given"


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        (as_given, {HERE: 1.0}),
        ([as_given, "length"], {HERE: 1.0, "length": 1.0}),
        ({as_given: 0.5, "length": 2}, {HERE: 0.5, "length": 2}),
        (REWARDS["length"], {"length": 1.0}),
    ],
    ids=["itself", "in a list", "with a weight", "a short name's"],
)
def test_functions_themselves(functions: Functions, expected: dict[str, float]) -> None:
    assert RewardSpec(functions=functions).weights({}) == expected
    role = pickle.loads(pickle.dumps(Reward(functions=functions, by_source={"b": {as_given: 3.0}})))  # noqa: S301
    assert role.spec.weights({}) == expected
    assert role.spec.weights({"data_source": "b"}) == {HERE: 3.0}


def test_functions_are_imported_by_name_and_awaited() -> None:
    spec = RewardSpec(functions={as_given: 1.0, awaited: 0.5})
    assert scored(spec, ["yes", "no"], [row(), row()])["scores"] == [4.5, 3.0]

    async def in_a_notebook() -> list[float]:
        return scored(spec, ["yes"], [row()])["scores"]

    assert asyncio.run(in_a_notebook()) == [4.5]


ONE_AT_A_TIME = asyncio.Semaphore(1)


async def in_turns(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """Asks something that the module holds for all calls."""

    async def ask(response: str) -> float:
        async with ONE_AT_A_TIME:
            await asyncio.sleep(0)
            return float(len(response))

    return await asyncio.gather(*map(ask, responses))


async def leaving(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """Ends the process."""
    sys.exit(3)


def test_what_is_awaited_is_awaited_in_one_loop() -> None:
    for _ in range(2):
        assert scored(RewardSpec(functions=in_turns), ["yes", "no"], [row(), row()])["scores"] == [3.0, 2.0]
    with pytest.raises(ValueError, match=r"leaving: RuntimeError over 1 rows.*sys\.exit\(3\)"):
        scored(RewardSpec(functions=leaving), ["yes"], [row()])
    assert scored(RewardSpec(functions=in_turns), ["yes", "no"], [row(), row()])["scores"] == [3.0, 2.0]


def test_functions_that_workers_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def inside(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
        return []

    alone = r"is not under its name at the top of a module, so workers cannot import it\. Write it with `def`"
    for function in (inside, lambda prompts, responses, rows: [0.0], partial(as_given)):
        with pytest.raises(ValueError, match=alone):
            Reward(functions=function)
    with pytest.raises(ValueError, match=r"cost\.functions: 5 is not"):
        Cost(functions=[5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"reward\.by_source: <function .*inside.* is not"):
        Reward(by_source={"a": {inside: 1.0}})
    monkeypatch.setattr(as_given, "__module__", "__main__")
    with pytest.raises(ValueError, match=r"as_given.* is in the script itself.*such as my_rewards\.py"):
        Reward(functions={as_given: 1.0})
    named = r"'__main__\.mine' is in the script itself, so workers cannot import it\."
    written: list[Functions] = ["__main__.mine", ["length", "__main__.mine"], {"__main__.mine": 0.5}]
    for functions in written:
        with pytest.raises(ValueError, match=rf"^reward\.functions: {named}"):
            Reward(functions=functions)
    with pytest.raises(ValueError, match=rf"^cost\.by_source: {named}"):
        Cost(by_source={"a": "__main__.mine"})


def test_a_weight_is_a_number() -> None:
    with pytest.raises(ValueError, match=r"exact_match has the weight 'a'\. A weight is a finite number"):
        _ = Reward(functions={"exact_match": "a"}).spec  # type: ignore[dict-item]
