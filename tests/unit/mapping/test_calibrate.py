"""The calibration: the engines' probes run, and the fit finds shares and overheads that explain them."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_lightning.mapping import calibrate, network, probe
from rlhf_lightning.mapping.fit import Key, fit, get, mean_square, replaced
from rlhf_lightning.mapping.hardware import CPU, Hardware
from tests.unit.pretended import GPU, pretended

pytestmark = pytest.mark.unit


def once(call: Callable[[], object]) -> float:
    """Seconds of a call, without a warm-up."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_the_engines_are_probed_and_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SIZES", ((64, 1),))
    monkeypatch.setattr(probe, "_ROWS", (2,))

    seconds = probe.run(tmp_path, torch.device("cpu"), once)
    assert sorted(seconds) == ["generate 64x1x2", "infer 64x1x2", "train 64x1x2"]
    observations = probe.observations(seconds, gpu=False)
    refined = calibrate.refine(CPU, observations)
    assert mean_square(observations)(refined) < mean_square(observations)(CPU)


def test_a_gpu_is_probed_in_the_type_of_its_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peak is that of a product in bfloat16. This GPU is pretended: its seconds say nothing."""
    monkeypatch.setattr(probe, "_GPU_SIZES", ((64, 1),))
    monkeypatch.setattr(probe, "_GPU_ROWS", (2,))
    (found,) = probe._probes(gpu=True).values()
    assert (found.workload.element, found.workload.masters) == (2, True)
    with pretended():
        assert probe._engine(found, tmp_path, GPU)._dtype == torch.bfloat16
        seconds = probe.run(tmp_path, GPU, once)
    assert [o.name for o in probe.observations(seconds, gpu=True)] == list(seconds)
    assert {(p.workload.element, p.workload.masters) for p in probe._probes(gpu=False).values()} == {
        (4, False)
    }


def test_links_are_those_of_which_all_reduces_take_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the slowest ranks: a small one is twice the hops of a tree, a large one a ring's traffic more."""
    peaks = [
        calibrate._Peaks(flops=2e11, bandwidth=4e10, small_s=small, large_s=0.05, probes={})
        for small in (1e-3, 2e-3, 1e-3, 1e-3)
    ]
    monkeypatch.setattr(calibrate, "_run", lambda _devices, **_: peaks)
    monkeypatch.setattr(calibrate, "refine", lambda rough, _: rough)
    found = calibrate.measure(devices=4)
    assert (found.gpus_per_node, found.intra_latency) == (4, 2e-3 / (2 * 2))
    assert found.intra_bandwidth == pytest.approx(2 * 3 / 4 * calibrate._LARGE / (0.05 - 2e-3))
    for crosses in (False, True):  # without GPUs, nodes are taken to be linked as processes are
        group = network.Group(4, crosses)
        assert network.all_reduce(found, group, calibrate._LARGE) == pytest.approx(0.05)


def test_a_refined_machine_predicts_what_made_the_seconds() -> None:
    """Twice the launches and half the products, found from simulated seconds of every probe."""
    efficiency = dataclasses.replace(CPU.efficiency, matmul=0.3)
    truth = dataclasses.replace(
        CPU, efficiency=efficiency, overhead=dataclasses.replace(CPU.overhead, layer=3e-3, decode_layer=2e-3)
    )
    names = [f"{kind} {name}" for name in probe._probes(gpu=False) for kind in ("infer", "train", "generate")]
    made = [o.predict(truth) for o in probe.observations(dict.fromkeys(names, 1.0), gpu=False)]
    observations = probe.observations(dict(zip(names, made, strict=True)), gpu=False)
    assert math.sqrt(mean_square(observations)(CPU)) > 0.3
    refined = calibrate.refine(CPU, observations)
    assert math.sqrt(mean_square(observations)(refined)) < 0.03
    assert refined.overhead.layer == pytest.approx(3e-3, rel=0.1)


@pytest.mark.parametrize(
    ("key", "start", "best", "tie", "found"),
    [
        (("efficiency", "matmul"), 0.9, 0.4, 1.0, 0.6),  # as near to one as to the other: sqrt(0.9 x 0.4)
        (("efficiency", "matmul"), 0.4, 0.9, 0.0, 0.8),  # its ceiling
        (("efficiency", "memory"), 0.4, 2.0, 0.0, 1.0),  # a share is never more
        (("overhead", "rows"), 10.0, 100.0, 0.0, 100.0),
    ],
)
def test_a_fit_stays_near_its_start_and_under_its_ceiling(
    key: Key, start: float, best: float, tie: float, found: float
) -> None:
    def loss(hardware: Hardware) -> float:
        return math.log(get(hardware, key) / best) ** 2

    fitted = fit(replaced(CPU, key, start), loss, [key], ceilings={"matmul": 0.8}, tie=tie)
    assert get(fitted, key) == pytest.approx(found, rel=0.01)
