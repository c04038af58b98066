"""Two nodes: which devices of which node a pool gets, that learning is the same, and what is refused."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import pytest
import ray
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import ResourcePool, WorkerError, WorkerTimeoutError
from rlhf_lightning.controller import cluster as ray_cluster
from rlhf_lightning.strategies import Colocated, Split
from rlhf_lightning.strategy import Strategy
from tests.ray.model import STEPS, Parameters, fit, furthest, ppo


class Nodes(Callback):
    """Notes the node of each device, numbered in the order in which they occur, and what it is called."""

    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = cast(Strategy, trainer.strategy)
        cluster = cast(ray_cluster.RayCluster, strategy._cluster)
        self.names = tuple(cluster.hosts)
        found = cast(list[tuple[str, int]], ray.get([a.node_cores.remote() for a in cluster.actors]))
        names = [name for name, _ in found]
        self.numbers = tuple(list(dict.fromkeys(names)).index(name) for name in names)


def await_devices(count: int) -> None:
    """Wait until so many are free."""
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) < count and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        pytest.param(
            lambda: Split(devices=4, actor_devices=1), (0, 1, 1, 1), id="the-second-pool-fits-one-node"
        ),
        pytest.param(lambda: Colocated(devices=4), (0, 0, 0, 1), id="one-pool-over-both"),
    ],
)
def test_a_pool_fills_a_node_before_it_spreads(
    alone: tuple[PPO, Parameters],
    strategy: Callable[[], Strategy],
    expected: tuple[int, ...],
    tiny: Path,
    tmp_path: Path,
) -> None:
    nodes = Nodes()
    await_devices(6)  # those of the test before may still be leaving
    across = fit(ppo(tiny), strategy(), tmp_path, steps=STEPS, callbacks=[nodes])
    assert nodes.numbers == expected
    assert nodes.names == (socket.gethostname(),) * 4, "both nodes are on this machine"
    assert furthest(alone[1], across) < 1e-5


def test_no_pool_that_fits_a_node_lies_in_two() -> None:
    await_devices(6)
    job = ray_cluster.RayCluster(None, timeout_s=60)
    try:
        job.start([ResourcePool(str(i), size, ()) for i, size in enumerate((1, 1, 1, 3))])
        found = cast(list[tuple[str, int]], ray.get([actor.node_cores.remote() for actor in job.actors]))
    finally:
        job.close()
    assert len({node for node, _ in found[-3:]}) == 1


def test_more_devices_than_the_cluster_has_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"need 7 devices, and there are 6 CPUs\. Try --strategy\.devices 6"):
        fit(ppo(tiny), Colocated(devices=7), tmp_path, steps=1)


def test_a_disk_of_checkpoints_that_a_node_does_not_see_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the models are loaded, and not only when the first checkpoint is written."""

    @contextmanager
    def unseen(*, prefix: str, dir: Path) -> Iterator[str]:
        yield str(dir / prefix)

    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(ray_cluster, "TemporaryDirectory", unseen)
    keeper = ModelCheckpoint(tmp_path / "kept")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/kept: checkpoints go there, and .* in {tmp_path} is"):
        fit(ppo(tiny), Colocated(devices=1), tmp_path, steps=1, callbacks=[keeper])


def test_devices_that_other_jobs_hold_are_counted(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "RESERVE_S", 1.0)
    others = placement_group([{"CPU": 1.0}] * 4)
    assert others.wait(30)
    try:
        said = r"actor needs 1 .* 2 devices of this one leave 0 CPUs\. .*devices 2 \("
        with pytest.raises(WorkerTimeoutError, match=said):
            fit(ppo(tiny), Split(devices=3, actor_devices=1), tmp_path, steps=1)
    finally:
        remove_placement_group(others)


def test_a_cluster_that_goes_away_is_named(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(bundles: list[dict[str, float]], strategy: str) -> PlacementGroup:
        group: PlacementGroup = placement_group(bundles, strategy)
        assert group.wait(30)  # Ray keeps devices of a group that is removed as it is made
        remove_placement_group(group)
        return group

    monkeypatch.setattr(ray_cluster, "placement_group", lost)
    with pytest.raises(WorkerError, match=r"pool \w+: the cluster went away .*does not exist.* host:port"):
        fit(ppo(tiny), Colocated(devices=1), tmp_path, steps=1)


def test_an_address_other_than_that_of_the_ray_connected_is_refused(
    cluster: str, tiny: Path, tmp_path: Path
) -> None:
    """Ray is connected already, as in a notebook: it was taken in silence."""
    ray_cluster.RayCluster(cluster, timeout_s=60).check(1)
    host, _, port = cluster.rpartition(":")
    for address in (f"{host}:{int(port) - 1}", f"192.0.2.1:{port}"):
        with pytest.raises(
            ValueError, match=rf"^strategy\.address='{address}': .* to the Ray at {cluster}\."
        ):
            fit(ppo(tiny), Colocated(devices=1, address=address), tmp_path, steps=1)
