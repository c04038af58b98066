"""The rounds of throughput.py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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


@pytest.mark.usefixtures("script")
def test_each_round_has_prompts_of_its_own() -> None:
    ours, iterations = map(importlib.import_module, ("ours_throughput", "iterations"))
    files = iterations.Workload.under(Path("nowhere"))
    runs = [iterations.Run(algo="grpo", workload=files, seed=seed) for seed in (1, 2)]
    assert [ours.prompts(run).effective_seed for run in runs] == [1, 2]
