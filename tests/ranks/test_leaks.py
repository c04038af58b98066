"""The checks of conftest.py see what they are there for: one test leaves each kind of thing, on purpose."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.leaks import Look, Process, Traces, restore, settled

SHORT_S = 0.2


def test_nothing_left_is_nothing_said(tmp_path: Path) -> None:
    before = Traces.take(tmp_path)
    assert settled(before, tmp_path, grace_s=0) == []


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAK_KEPT", "a")
    monkeypatch.setenv("LEAK_GONE", "b")
    before = Traces.take(tmp_path)
    os.environ["LEAK_KEPT"] = "c"
    os.environ["LEAK_NEW"] = "d"
    del os.environ["LEAK_GONE"]
    words = settled(before, tmp_path, grace_s=0)
    assert words == [
        "environment variable LEAK_GONE: 'b' -> None",
        "environment variable LEAK_KEPT: 'a' -> 'c'",
        "environment variable LEAK_NEW: None -> 'd'",
    ]
    restore(before.environment)
    assert settled(before, tmp_path, grace_s=0) == []


def test_thread(tmp_path: Path) -> None:
    before, stop = Traces.take(tmp_path), threading.Event()
    thread = threading.Thread(target=stop.wait, name="leak")
    thread.start()
    assert settled(before, tmp_path, grace_s=SHORT_S) == ["thread 'leak'"]
    stop.set()
    assert settled(before, tmp_path) == []


def test_child_process(tmp_path: Path) -> None:
    before = Traces.take(tmp_path)
    with subprocess.Popen(["sleep", "30"]) as child:
        assert settled(before, tmp_path, grace_s=SHORT_S) == [f"process {child.pid}: sleep 30"]
        child.kill()
    assert settled(before, tmp_path) == []


def test_orphan_process(tmp_path: Path) -> None:
    before = Traces.take(tmp_path)
    shell = subprocess.run(
        ["sh", "-c", "sleep 31 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    pid = int(shell.stdout)
    assert settled(before, tmp_path, grace_s=SHORT_S) == [f"process {pid}: sleep 31"]
    os.kill(pid, 9)
    assert settled(before, tmp_path) == []


def test_port(tmp_path: Path) -> None:
    before = Traces.take(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert settled(before, tmp_path, grace_s=0) == [f"listening port {server.getsockname()[1]}"]
    assert settled(before, tmp_path, grace_s=0) == []


@pytest.mark.parametrize(
    ("files", "expected"), [("top", ["file top.txt"]), ("all", ["file inner/x.txt", "file top.txt"])]
)
def test_file(tmp_path: Path, files: Look, expected: list[str]) -> None:
    (tmp_path / "inner" / "__pycache__").mkdir(parents=True)
    before = Traces.take(tmp_path, files=files)
    for name in ("top.txt", "inner/x.txt", "inner/__pycache__/x.pyc"):
        (tmp_path / name).touch()
    assert settled(before, tmp_path, files=files, grace_s=0) == expected


def test_pool_of_a_cluster_is_no_leak_but_an_actor_is() -> None:
    def traces(*rows: tuple[int, int, str]) -> Traces:
        table = {pid: Process(pid=pid, parent=parent, command=command) for pid, parent, command in rows}
        return Traces(environment={}, threads={}, processes=table, ports=frozenset(), files=frozenset())

    cluster = (10, 1, "/ray/raylet --port 1")
    after = traces(
        cluster, (11, 10, "ray::IDLE"), (12, 10, "python default_worker.py"), (13, 10, "ray::Device.call")
    )
    assert traces(cluster).left(after) == ["process 13: ray::Device.call"]
    assert len(traces().left(after)) == len(after.processes)


def test_conftest_turns_leaks_into_errors(tmp_path: Path) -> None:
    (tmp_path / "test_leaky.py").write_text(
        "import os, subprocess, threading, time\n"
        "import tests.leaks\n"
        "tests.leaks.GRACE_S = 0.2\n"
        "def test_clean(): pass\n"
        "def test_variable(): os.environ['LEAK'] = '1'\n"
        "def test_thread(): threading.Thread(target=time.sleep, args=(2,), name='leak').start()\n"
        "def test_process(): subprocess.Popen(['sleep', '2.5'])\n"
        "def test_after(): assert 'LEAK' not in os.environ\n"
    )
    options = f"-q -p tests.conftest -c {os.devnull} --rootdir".split()
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path), str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "5 passed" in run.stdout
    assert "3 errors" in run.stdout, run.stdout
    for word in ("environment variable LEAK", "thread 'leak'", "sleep 2.5"):
        assert word in run.stdout
