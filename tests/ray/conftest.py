"""One Ray cluster of two nodes for all tests of this folder, and a model small enough to train in seconds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from rlhf_lightning.algos import PPO
from rlhf_lightning.strategies import Colocated
from tests.ray.cluster import started
from tests.ray.model import STEPS, Parameters, fit, ppo, write_tiny

SIZES = (3, 3)
"""CPUs of the two nodes: a pool of 3 devices fits on one, a pool of 4 does not."""
BACK_S = 20.0
"""Devices that were given back get this long, in seconds, to be free."""


@pytest.fixture(scope="session", autouse=True)
def nodes(session_leaves_nothing: None) -> Iterator[Cluster]:
    """Start Ray before a module or a test is looked at, so that its processes are nobody's leak."""
    with started(*SIZES) as nodes:
        yield nodes


@pytest.fixture(scope="module", autouse=True)
def devices_come_back(nodes: Cluster) -> Iterator[None]:
    """Let no module keep devices of the cluster, for which a later one would wait in vain."""
    yield
    deadline = time.monotonic() + BACK_S
    while (held := _held()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if held:
        groups = {name: group["state"] for name, group in placement_group_table().items()}
        left = [name for name, state in groups.items() if state != "REMOVED"]
        pytest.fail(f"{held:.0f} CPUs are held, {ray.available_resources()} are free; groups: {left}")


def _held() -> float:
    """CPUs of the cluster that are not free."""
    return float(ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0))


@pytest.fixture(scope="session")
def cluster(nodes: Cluster) -> str:
    """The address of the cluster."""
    return str(nodes.address)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a two-layer Llama's config.json and the embedded tokenizer, without weights."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def alone(cluster: str, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PPO, Parameters]:
    """Three iterations with all models on one device, which other runs are compared with."""
    algorithm = ppo(tiny)
    return algorithm, fit(algorithm, Colocated(devices=1), tmp_path_factory.mktemp("alone"), steps=STEPS)
