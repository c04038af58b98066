"""Runs by command over devices that NCCL joins say what one GPU says; too few GPUs are shared.

Ray gives its workers what it saw as it started, so a GPU that is named four times is four devices.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from tests import logged
from tests.gpu import ranks
from tests.ray import commands

DEVICES = 4
STEPS = "--trainer.max_steps 3 --trainer.logger CSVLogger"
HYBRID = "--strategy hybrid3d --strategy.devices 4"
RUNS = {
    "colocated": "--strategy colocated --strategy.devices 2",
    "offloaded": "--strategy colocated --strategy.devices 2 --strategy.offload true",
    "tensor ranks": "--strategy colocated --strategy.devices 2 --strategy.settings.train.tensor 2",
    "split": "--strategy split --strategy.devices 4",
    "sent weights": "--strategy openrlhf --strategy.devices 4",
    "p 2, t 2": f"{HYBRID} --strategy.parallel.p 2 --strategy.parallel.t 2",
    "t 4, tg 2": f"{HYBRID} --strategy.parallel.t 4 --strategy.parallel.generate.t 2",
}
NOT_COMPARED = ("memory/", "throughput/", "time/")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> logged.Metrics:
    """What one GPU logs, without Ray."""
    return run("--strategy local", tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def devices(one: logged.Metrics) -> Iterator[None]:
    """A Ray of four devices, each a GPU, or a part of one."""
    ranks.need(DEVICES)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks.num_gpus())))
    names, folder = seen.split(","), tempfile.mkdtemp(prefix="ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names[rank % len(names)] for rank in range(DEVICES)))
        for name, value in ranks.SHARED.items() if len(names) < DEVICES else ():
            patch.setenv(name, value)
        node = {"num_cpus": DEVICES, "num_gpus": DEVICES, "include_dashboard": False}
        nodes = Cluster(initialize_head=True, head_node_args=node)
        patch.setenv("CUDA_VISIBLE_DEVICES", seen)
        ray.init(address=nodes.address, log_to_driver=False)
        yield
        ray.shutdown()
        nodes.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def run(words: str, folder: Path) -> logged.Metrics:
    """PPO's metrics."""
    commands.run(f"rlhf fit --algo ppo {words} {STEPS} --trainer.logger.save_dir {folder}", cwd=folder)
    return logged.csv_file(folder)


@pytest.mark.parametrize("name", RUNS)
def test_several_devices_say_what_one_says(
    name: str, one: logged.Metrics, devices: None, tmp_path: Path
) -> None:
    found = run(RUNS[name], tmp_path)
    compared = [each for each in one if not each.startswith(NOT_COMPARED)]
    assert "reward/mean" in compared
    for each in compared:
        assert found[each] == pytest.approx(one[each], rel=1e-3, abs=1e-6), each
