"""`rlhf calibrate`: what it refuses, and a machine refined by a run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_lightning.mapping import calibrate, hardware, measured
from rlhf_lightning.mapping.hardware import CPU
from tests.unit.mapping.test_measured import FASTER, run_on
from tests.unit.rlhf import Rlhf


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run on a machine that is faster than it was thought."""
    measured.begin(tmp_path / measured.FILE, CPU)
    for iteration in run_on(FASTER):
        measured.append(tmp_path / measured.FILE, iteration)
    return tmp_path


def test_a_run_refines_what_it_was_predicted_with(rlhf: Rlhf, run: Path) -> None:
    out = run / "better.yaml"
    code, said, err = rlhf.run("calibrate", str(out), "--from", str(run))
    assert (code, err) == (0, "")
    rows = [line.split() for line in said.splitlines()]
    before, after = (int(row[-1].strip("%")) for row in rows if row[:1] == ["iteration"])
    assert before > 50
    assert abs(after) <= 5
    assert hardware.load(str(out)).name == "better"
    assert f"written to {out}" in said


def test_runs_that_are_not_there(rlhf: Rlhf, run: Path, tmp_path: Path) -> None:
    said = rlhf.refused("calibrate", "machine.yaml", "--from", str(tmp_path / "none"))
    assert "no measurements are there" in said
    assert rlhf.refused("calibrate", "s3://a/b.yaml").startswith("out=s3://a/b.yaml: is in a store")
    assert "--trainer.callbacks+=PredictedTimes" in said
    assert "Leave --devices out" in rlhf.refused("calibrate", "x.yaml", "--from", str(run), "--devices", "2")
    assert not Path("machine.yaml").exists()


def test_processes_that_do_not_answer(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibrate, "_TIMEOUT_S", 0.0)
    monkeypatch.setattr(calibrate, "_rank", lambda *_: time.sleep(60))
    said = rlhf.refused("calibrate", str(tmp_path / "x.yaml"), "--devices", "2")
    assert said.startswith("calibrate: no answer in 0 s. Try again with fewer devices, such as --devices 1")
    assert not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize(("here", "counted"), [(2, "2 GPUs"), (1, "1 GPU")])
def test_more_devices_than_gpus(
    rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: int, counted: str
) -> None:
    """Each process without a GPU would die, and the others wait for it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: here)
    monkeypatch.setattr(calibrate, "_run", lambda *_, **__: pytest.fail("it was measured"))
    said = rlhf.refused("calibrate", str(tmp_path / "x.yaml"), "--devices", "4")
    assert said.startswith(f"--devices 4: this machine has {counted}. Try --devices {here}, or leave it out")
    with pytest.raises(pytest.fail.Exception, match="it was measured"):
        rlhf.run("calibrate", str(tmp_path / "x.yaml"), "--devices", str(here))


def test_what_one_node_cannot_measure_is_said(
    rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "rlhf_lightning.commands.calibrate.measure",
        lambda *, name, devices: replace(hardware.H100, name=name),
    )
    out = tmp_path / "machine.yaml"
    code, said, err = rlhf.run("calibrate", str(out))
    assert (code, err) == (0, "")
    assert hardware.load(str(out)).name == "machine"
    assert "network between nodes was not measured: inter_bandwidth is 4e+11 bytes/s a node" in said


def test_where_nothing_can_be_written_nothing_is_measured(
    rlhf: Rlhf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured_anyway(**_: object) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr("rlhf_lightning.commands.calibrate.measure", measured_anyway)
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "machine.yaml"
    assert rlhf.refused("calibrate", str(out)) == f"{out.parent}: File exists."
    assert "is a directory. Type the file to write" in rlhf.refused("calibrate", str(tmp_path))
    with pytest.raises(AssertionError, match="it was measured"):
        rlhf.run("calibrate", str(tmp_path / "new" / "machine.yaml"))
