"""The rounds of throughput.py: who runs behind whom, what is compared, and what a failure leaves."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("ray")  # it sets a variable as it is imported, which ours_throughput does

from tests.conftest import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, which finds the others beside it, as it does when it is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    yield importlib.import_module("throughput")
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == ROOT / "benchmarks":
            del sys.modules[name]


class Machine:
    """Runs take as long as they are told; some fail."""

    def __init__(self, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script = script
        self.seconds: Iterator[float] = itertools.repeat(1.0)
        self.rates: Iterator[float] = itertools.repeat(1e12)
        self.failing: dict[str, Exception] = {}
        self.ran: list[tuple[str, str, int]] = []
        monkeypatch.setattr(script, "measure", self.measure)
        monkeypatch.setattr(script.bound, "matrix_rate", lambda *_: next(self.rates))

    def measure(self, algo: str, setting: object, *, seed: int, **_: object) -> object:
        """One iteration of 64 rows."""
        if str(setting) in self.failing:
            raise self.failing[str(setting)]
        self.ran.append((algo, str(setting).partition(",")[0], seed))
        return self.script.Measured(
            seconds=[next(self.seconds)], prompt_tokens=[4096], response_tokens=[[128] * 64]
        )


@pytest.fixture
def machine(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(script, monkeypatch)


def chosen(script: ModuleType, *systems: str, algos: tuple[str, ...] = ("grpo",)) -> Mapping[Any, Any]:
    """The first setting of each side."""
    sides = itertools.product(algos, systems)
    return {side: script.settings(*side, ["float32"])[:1] for side in sides}


def test_ours_runs_right_behind_each_peer(script: ModuleType) -> None:
    def order(*systems: str, algos: tuple[str, ...] = ("grpo",)) -> list[str]:
        turns = script.in_pairs(chosen(script, *systems, algos=algos))
        return [f"{algo} {setting.system}" for algo, setting in turns]

    assert order("trl", "verl", "ours") == ["grpo trl", "grpo ours", "grpo verl", "grpo ours"]
    assert order("ours", "trl") == ["grpo trl", "grpo ours"]
    assert order("ours") == ["grpo ours"]
    assert order("verl") == ["grpo verl"]
    both = order("trl", "ours", algos=("ppo", "remax"))
    assert both == ["ppo trl", "ppo ours", "remax ours"]  # TRL has no ReMax


def test_ratios_are_of_neighbours(script: ModuleType, machine: Machine) -> None:
    machine.seconds = iter([6.0, 3.0, 8.0, 2.0])
    turns = script.in_pairs(chosen(script, "trl", "verl", "ours"))
    found = script.compared([script.one_round(turns, iterations=1, lengths="fixed", seed=1)], "grpo", "fixed")
    assert found["trl"]["ours_over_it"].median == pytest.approx(6 / 3)
    assert found["verl"]["ours_over_it"].median == pytest.approx(8 / 2)
    assert "ours_over_it" not in found["ours"]
    assert found["ours"]["tokens_per_s"].low == pytest.approx(12288 / 3)


def test_the_bound_is_of_the_better_rate_around_a_run(script: ModuleType, machine: Machine) -> None:
    machine.rates = iter([1.0, 3.0, 2.0])
    turns = script.in_pairs(chosen(script, "trl", "ours"))
    assert [run.rate for run in script.one_round(turns, iterations=1, lengths="fixed", seed=1)] == [3.0, 3.0]
    machine.rates = iter([1.0, 2.0, 4.0])
    assert [run.rate for run in script.one_round(turns, iterations=1, lengths="fixed", seed=1)] == [2.0, 4.0]


def started(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str) -> None:
    monkeypatch.setattr(script.environments, "RESULTS", tmp_path)
    monkeypatch.setattr(script.workload, "write", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["throughput.py", *words.split()])
    script.main()


def test_a_setting_that_fails_in_the_trial_is_left_out(
    script: ModuleType,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, *_ = map(str, script.settings("grpo", "trl", ["float32"]))
    machine.failing = {first: RuntimeError("no room"), second: subprocess.TimeoutExpired("trl_grpo.py", 9)}
    started(script, monkeypatch, tmp_path, "--rounds 2 --algos grpo --systems trl ours")
    assert f"grpo, {first}: left out, as it failed: no room" in capsys.readouterr().out
    assert [ran for ran in machine.ran if ran[2]] == [
        ("grpo", system, seed) for seed in (1, 2) for system in ("trl", "ours")
    ]
    machine.failing = {str(each): RuntimeError() for each in script.settings("grpo", "trl", ["float32"])}
    with pytest.raises(SystemExit, match="no setting ran: grpo, trl"):
        started(script, monkeypatch, tmp_path, "--rounds 1 --algos grpo --systems trl ours")


def test_rounds_before_a_failure_are_kept(
    script: ModuleType,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def seconds() -> Iterator[float]:
        yield from [1.0] * (len(script.settings("ppo", "verl", ["float32"])) + 2 + 2)
        raise RuntimeError("verl_train.py ended with 1")

    machine.seconds = seconds()
    with pytest.raises(RuntimeError, match=r"^verl_train\.py ended"):
        started(script, monkeypatch, tmp_path, "--rounds 3 --algos ppo --systems verl ours")
    (round_1,) = json.loads((tmp_path / "throughput.json").read_text())["rounds"]
    assert [run["setting"]["system"] for run in round_1] == ["verl", "ours"]
    assert "ppo, verl: 12288.00 [12288.00 .. 12288.00] tokens/s" in capsys.readouterr().out


@pytest.mark.usefixtures("script")
def test_each_round_has_prompts_of_its_own() -> None:
    ours, iterations = map(importlib.import_module, ("ours_throughput", "iterations"))
    files = iterations.Workload.under(Path("nowhere"))
    runs = [iterations.Run(algo="grpo", workload=files, seed=seed) for seed in (1, 2)]
    assert [ours.prompts(run).effective_seed for run in runs] == [1, 2]
