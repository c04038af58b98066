"""The file of a run's measurements: written, read, refused, and used to refine a machine."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rlhf_lightning.mapping import measured
from rlhf_lightning.mapping.calibrate import refine, refine_by_run
from rlhf_lightning.mapping.dataflow import Kind
from rlhf_lightning.mapping.hardware import A100, CPU, Hardware
from rlhf_lightning.mapping.phases import Iteration, Phase
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel import ParallelLayout
from tests.unit.mapping.test_phases import iteration, phase

SMALL = ModelShape(
    name="small", layers=6, hidden=128, intermediate=384, heads=4, kv_heads=2, vocab=264, tied=True
)
FASTER = replace(
    CPU,
    peak_flops=3 * CPU.peak_flops,
    memory_bandwidth=2 * CPU.memory_bandwidth,
    overhead=replace(CPU.overhead, layer=3e-4, call=3e-3),
)


WORK: tuple[tuple[str, Kind], ...] = (("actor", "generate"), ("critic", "infer"), ("actor", "train"))


def run_on(truth: Hardware) -> list[Iteration]:
    """What a run of PPO would measure if the simulators were right."""
    found = []
    for step, (rows, tokens) in enumerate([(32, 24), (64, 20), (32, 16), (128, 30)], 1):
        workload = Workload(
            prompt=16, real_prompt=12, response=tokens, batch=rows, mini_batches=1, packed=True, element=4,
            masters=False, recompute=False, max_resident=0, micro_batch_tokens=2048,
        )  # fmt: skip
        phases = [
            Phase(
                role=role, method=kind, kind=kind, calls=1, seconds=1.0, devices=(0,), shape=SMALL,
                layout=ParallelLayout(), workload=workload,
            )
            for role, kind in WORK
        ]  # fmt: skip
        took = tuple(replace(one, seconds=one.predict(truth)) for one in phases)
        whole = Iteration(step=step, seconds=1.0, calls=6, phases=took)
        found.append(replace(whole, seconds=whole.predict(truth)))
    return found


def test_a_run_reveals_the_machine() -> None:
    """Peaks that are too low are raised, overheads found, and a call costs what nothing else explains."""
    iterations = run_on(FASTER)
    found = refine_by_run(CPU, iterations)
    for one in iterations:
        assert one.predict(CPU) / one.seconds > 1.5
        assert one.predict(found) / one.seconds == pytest.approx(1, abs=0.05)
        for each in one.phases:
            assert each.predict(found) / each.seconds == pytest.approx(1, abs=0.12)
    assert found.overhead.call == pytest.approx(3e-3)
    assert found.peak_flops > 1.5 * CPU.peak_flops


def test_a_peak_that_nothing_exceeds_stays() -> None:
    slower = replace(CPU, efficiency=replace(CPU.efficiency, matmul=0.4, memory=0.5))
    found = refine(CPU, measured.observations(run_on(slower)))
    assert found.peak_flops == pytest.approx(CPU.peak_flops)
    assert found.memory_bandwidth == pytest.approx(CPU.memory_bandwidth)


def test_the_first_iteration_and_that_after_a_resume_are_left_out(tmp_path: Path) -> None:
    steps = [replace(iteration(phase("critic", "infer")), step=step) for step in (1, 2, 3, 4, 5)]
    file = tmp_path / "run" / measured.FILE
    measured.begin(file, CPU)
    measured.append(file, steps[0])
    assert measured.read(file.parent) == (CPU, steps[:1])
    for one in steps[1:3]:
        measured.append(file, one)
    measured.begin(file, A100)
    for one in steps[3:]:
        measured.append(file, one)
    assert measured.read(file.parent) == (A100, [steps[1], steps[2], steps[4]])
    assert measured.read(file)[1] == measured.read(file.parent)[1]
    for begin in (partial(measured.begin, file, CPU), partial(measured.append, file, steps[0])):
        file.unlink()
        begin()
        with pytest.raises(ValueError, match=r"holds no iteration\. Run a few: rlhf fit .*PredictedTimes"):
            measured.read(file)


def test_no_run_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"elsewhere: no measurements are there; .*\+=PredictedTimes .*elsewhere"
    ):
        measured.read(tmp_path / "elsewhere")
    file = tmp_path / measured.FILE
    for line in (
        '{"step": 2',
        '{"step": 2, "seconds": 1.0, "calls": 1}',
        "[]",
        '{"hardware": {"name": "x"}}',
    ):
        file.unlink(missing_ok=True)
        measured.begin(file, CPU)
        with file.open("a") as lines:
            lines.write(line + "\n")
        with pytest.raises(ValueError, match=re.escape(f"{file}, line 2: is not a measurement (")):
            measured.read(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=re.escape(f"{file}, line 1: is not a measurement (")):
        measured.read(file)


def test_long_runs_are_thinned() -> None:
    steps = [replace(iteration(phase("critic", "infer")), step=step) for step in range(1, 1001)]
    kept = measured.sample(steps)
    assert len(kept) == 20
    assert (kept[0].step, kept[-1].step) == (1, 951)


def test_the_table() -> None:
    """Medians: of 1, 2 and 9 seconds, 2."""
    one = phase("critic", "infer")
    runs = [iteration(replace(one, seconds=s), seconds=2 * s) for s in (1.0, 9.0, 2.0)]
    title, first, last = measured.table(runs, CPU).splitlines()
    assert "cpu" in title
    error = round(100 * (one.predict(CPU) / 2 - 1))
    assert first.split() == ["critic.infer", "2.000", f"{one.predict(CPU):.3f}", f"{error:+d}%"]
    assert last.split()[:2] == ["iteration", "4.000"]
