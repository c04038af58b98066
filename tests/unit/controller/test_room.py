"""How many devices find room on which nodes, and that nobody is told to type as many as there are not."""

from __future__ import annotations

import re

import pytest
import ray
from ray._private import state

from rlhf_lightning.controller.room import check_room, held

OR = " (--strategy colocated takes any number), or"
"""What follows fewer devices, before other advice."""
FEW = (("head", 64, 0), ("a", 4, 8), ("b", 2, 6), ("c", 8, 8))
"""Of each node: its name, CPUs and GPUs."""


def nodes(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int, int]) -> None:
    """Have the cluster consist of these; one more has died."""
    told = [
        {"NodeManagerHostname": name, "Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}}
        for name, cpus, gpus in found
    ]
    dead = {"NodeManagerHostname": "dead", "Alive": False, "Resources": {"CPU": 99.0, "GPU": 99.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [*told, dead])
    total = {"CPU": sum(cpus for _, cpus, _ in found), "GPU": sum(gpus for _, _, gpus in found)}
    monkeypatch.setattr(ray, "cluster_resources", lambda: total)


def test_gpus_for_which_their_node_has_no_cpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, *FEW)
    check_room(14, "GPU")
    with pytest.raises(
        ValueError,
        match=r"need 15 devices, each of one CPU and one GPU of a node, and there is room for 14: a has 4 "
        rf"CPUs for 8 GPUs, b has 2 CPUs for 6 GPUs\. Try --strategy\.devices 14{re.escape(OR)} `ray start` "
        r"with --num-cpus 8 there\.",
    ):
        check_room(15, "GPU")
    nodes(monkeypatch, ("head", 64, 0), ("a", 0, 8))
    with pytest.raises(ValueError, match=r"room for 0: a has 0 CPUs for 8 GPUs\. Try `ray start` with --num"):
        check_room(1, "GPU")


@pytest.mark.parametrize(
    ("cpus", "told"),
    [
        (6, f"and there are 6 CPUs. Try --strategy.devices 6{OR} --strategy"),
        (1, f"and there is 1 CPU. Try --strategy.devices 1{OR} --strategy"),
        (0, "and there are 0 CPUs. Try --strategy.address"),
    ],
)
def test_more_devices_than_there_are_are_refused(
    monkeypatch: pytest.MonkeyPatch, cpus: int, told: str
) -> None:
    nodes(monkeypatch, ("a", cpus, 0))
    check_room(cpus, "CPU")
    with pytest.raises(ValueError, match="the pools need 7 devices, and") as said:
        check_room(7, "CPU")
    assert told in str(said.value)


@pytest.mark.parametrize(
    ("free", "kind", "started", "told"),
    [
        (({"CPU": 2.0}, {"CPU": 1.0}), "CPU", 1, f"leave 3 CPUs. Try --strategy.devices 4{OR} again when"),
        (
            ({"CPU": 64.0}, {"CPU": 1.0, "GPU": 5.0}),
            "GPU",
            0,
            f"leave 65 CPUs, 5 GPUs. Try --strategy.devices 1{OR}",
        ),
        (({"CPU": 64.0}, {"GPU": 8.0}), "GPU", 0, "64 CPUs, 8 GPUs. Try again when those jobs have ended."),
        (
            ({"CPU": 4.0}, {"CPU": 5.0}),
            "CPU",
            0,
            "leave 9 CPUs. Type the command again: they are on several nodes",
        ),
        (({}, {"memory": 1.0}), "CPU", 0, "leave 0 CPUs. Try again when those jobs have ended."),
    ],
    ids=["some", "on-one-node", "on-none", "taken-meanwhile", "nothing"],
)
def test_what_other_jobs_leave_is_counted_node_by_node(
    monkeypatch: pytest.MonkeyPatch, free: tuple[dict[str, float], ...], kind: str, started: int, told: str
) -> None:
    monkeypatch.setattr(state, "available_resources_per_node", lambda: dict(enumerate(free)))
    assert told in held("main", 9, kind, started=started)
