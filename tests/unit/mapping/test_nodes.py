"""The hardware of a run has the nodes of the cluster that the run has joined, not those of its controller."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
import torch

from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import cluster
from rlhf_lightning.mapping import machine
from rlhf_lightning.mapping.hardware import A100, CPU
from rlhf_lightning.mapping.machine import of_a_run
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.strategies import Auto
from rlhf_lightning.strategies.auto import MappingOption
from rlhf_lightning.workers import Settings
from tests.unit.mapping.simulated import ROLES, SEVEN, flow_of
from tests.unit.mapping.test_search_auto import attached

HEAD = ("head", 0, "")
OPTION = "strategy.mapping.hardware"


def joined(monkeypatch: pytest.MonkeyPatch, *nodes: tuple[str, int, str]) -> None:
    """Have this process, on the first, be connected to such nodes: name, GPUs, kind; one more has died."""
    told = [
        {
            "NodeManagerHostname": name,
            "NodeID": f"id of {name}",
            "Alive": True,
            "Resources": {"CPU": 8.0}
            | ({"GPU": float(gpus), f"accelerator_type:{kind}": 1.0} if gpus else {}),
        }
        for name, gpus, kind in nodes
    ]
    dead = {"NodeManagerHostname": "dead", "Alive": False, "Resources": {"GPU": 7.0}}
    own = SimpleNamespace(get_node_id=lambda: f"id of {nodes[0][0]}")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: own)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [*told, dead])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(sum(n for _, n, _ in nodes))})


@pytest.mark.parametrize(("counts", "node"), [((4, 4), 4), ((8, 4), 4), ((6, 4), 2), ((8,), 8), ((), 8)])
def test_a_node_has_what_divides_each_of_the_clusters(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], node: int
) -> None:
    joined(monkeypatch, HEAD, *((f"n{i}", count, "A100") for i, count in enumerate(counts)))
    assert of_a_run("a100-80gb", 12, option=OPTION).gpus_per_node == node


@pytest.mark.parametrize(("devices", "node"), [(8, 8), (16, 8), (17, 1), (20, 1)])
def test_nodes_that_a_run_does_not_need_make_no_other_smaller(
    monkeypatch: pytest.MonkeyPatch, devices: int, node: int
) -> None:
    """A workstation with one GPU beside two nodes of eight."""
    joined(monkeypatch, ("desk", 1, "A100"), ("a", 8, "A100"), ("b", 8, "A100"))
    assert of_a_run("a100-80gb", devices, option=OPTION).gpus_per_node == node


def test_tensor_shards_stay_inside_the_nodes_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of four, and a name whose nodes have eight: pools lie in one node, or are all of it."""
    joined(monkeypatch, HEAD, ("a", 4, "A100"), ("b", 4, "A100"))
    strategy = attached(
        Auto(settings=Settings(engine="megatron"), mapping=MappingOption(hardware="a100-80gb")), PPO()
    )
    assert strategy.place(ROLES, 8)
    found = strategy.plan(8)
    assert {pool.devices for mapping in found.mappings for pool in mapping.pools} <= {1, 2, 4, 8}
    seven = SimulatedCosts(
        found.costs.hardware, flow_of(64), dict.fromkeys(ROLES, SEVEN), workload=Workload()
    )
    assert max(layout.t for layout in seven.layouts("actor", 8)) == 4


def test_gpus_of_several_kinds_are_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch, ("a", 8, "H200"), ("b", 8, "A100"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "this_machine", lambda _: A100)
    with pytest.raises(ValueError, match=r"hardware: .* several kinds, H200 on a, A100 on b, .* Say which"):
        of_a_run("", 16, option=OPTION)
    assert of_a_run("a100-80gb", 16, option=OPTION).memory_bytes == A100.memory_bytes
    joined(monkeypatch, ("a", 8, "A100"), ("b", 4, "A100"))
    assert of_a_run("", 12, option=OPTION).gpus_per_node == 4


def test_a_gpu_that_the_cluster_is_not_given_describes_none_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a login node that takes part with `--num-gpus 0`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "this_machine", lambda _: A100)
    joined(monkeypatch, HEAD, ("a", 8, "H200"))
    said = r"hardware: the cluster has 8 GPUs, and this process sees none of them\. Say of which kind"
    with pytest.raises(ValueError, match=said):
        of_a_run("", 8, option=OPTION)
    joined(monkeypatch, ("a", 8, "A100"), ("b", 8, "A100"))
    assert of_a_run("", 8, option=OPTION) == A100


def test_without_a_cluster_nodes_are_as_they_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "num_gpus", lambda: 0)
    assert of_a_run("a100-80gb", 16, option=OPTION) == A100
    assert of_a_run("", 3, option=OPTION).peak_flops == CPU.peak_flops
