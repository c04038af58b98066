"""Clusters of several kinds of devices: read, searched like trying everything, and reported."""

from __future__ import annotations

import json
import math
import random
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rlhf_lightning.commands import map as command
from rlhf_lightning.mapping import allocate, cluster, hardware
from rlhf_lightning.mapping.hardware import A100, H100
from rlhf_lightning.mapping.partitions import pool_sizes
from rlhf_lightning.mapping.search import DeviceKind, Search
from tests.ranks.mapping.test_search import brute_force, recomputed
from tests.unit.mapping.random_costs import RandomCosts
from tests.unit.mapping.simulated import ROLES
from tests.unit.rlhf import Rlhf

ASKED = ("--algo", "ppo", "--model", "llama-7b", "--batch", "256")


def test_an_allocation_takes_memory_for_few_tables_of_places() -> None:
    """A table of places is 0.3 MB here; one for each of the 256 sizes, all at once, would be 68 MB."""
    sizes = np.arange(1, 129)
    devices = np.vstack([np.outer(sizes, kind) for kind in np.eye(2, dtype=np.int64)])
    sets = [allocate.Choices(devices, work / devices.sum(axis=1, keepdims=True)) for work in np.eye(2) + 1]
    tracemalloc.start()
    try:
        found = allocate.allocate(sets, (128, 128))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == (2 * 2 / 128, [127, 255])
    assert peak_bytes < 10e6


@pytest.mark.parametrize("part", range(2))
def test_equals_brute_force(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if part:  # the cases are small: without this, the first pass would keep everything
        monkeypatch.setattr(allocate, "_BEAM", 1)
        monkeypatch.setattr(allocate, "_PRUNE_ABOVE", 1)
    fits = mixed = 0
    for seed in range(30 * part, 30 * part + 30):
        draw = random.Random(seed)  # noqa: S311
        roles = ROLES[: draw.randint(2, 4)]
        kinds = []
        for number in range(draw.choice([2, 2, 3])):
            capacity, devices = draw.choice([6.0, 10.0, 16.0]), draw.choice([2, 4, 6])
            costs = RandomCosts(100 * seed + number, roles, draw.choice([1, 2]), not number, capacity)
            kinds.append(DeviceKind(costs, devices, pool_sizes(devices, 2)))
        expected = [s for s in brute_force(kinds, roles) if math.isfinite(s)]
        found = Search(kinds, roles).best(5)
        assert [m.seconds for m in found] == pytest.approx(expected[:5], rel=1e-9), seed
        fits += bool(expected)
        for mapping in found:
            mixed += len({pool.kind for pool in mapping.pools}) > 1
            assert sorted(r for pool in mapping.pools for r in pool.roles) == sorted(roles)
            stages = [0.0] * 3
            for number, kind in enumerate(kinds):
                mine = [pool for pool in mapping.pools if pool.kind == number]
                assert sum(pool.devices for pool in mine) <= kind.devices
                assert isinstance(kind.costs, RandomCosts)
                stages = [max(pair) for pair in zip(stages, recomputed(kind.costs, mine), strict=True)]
            assert sum(mapping.stages) == pytest.approx(sum(stages), rel=1e-9)
    assert fits > 20
    assert mixed > 20


def test_two_halves_of_a_kind_are_the_whole() -> None:
    """The same devices under two names: no worse than any mapping whose sets fit into the halves."""
    costs = RandomCosts(5, ROLES, 2, twins=False)
    half = DeviceKind(costs, 8, (1, 2, 4, 8))
    whole = Search([DeviceKind(costs, 16, (1, 2, 4, 8))], ROLES).best()
    assert [m.seconds for m in Search([half, half], ROLES).best()] == pytest.approx([whole[0].seconds])


def test_how_clusters_are_written(tmp_path: Path) -> None:
    assert cluster.load("a100-80gb", 16) == ((A100, 16),)
    assert cluster.load("a100-80gb:16", None) == ((A100, 16),)
    both = ((A100, 16), (H100, 8))
    assert cluster.load("a100-80gb:16, h100-80gb:8", 24) == both
    own = tmp_path / "own.yaml"
    hardware.save(H100, own)
    assert cluster.load(str(own), 8) == ((H100, 8),)
    assert cluster.load(f"a100-80gb:16,{own}:8", None) == both


@pytest.mark.parametrize(
    ("source", "devices", "said"),
    [
        ("a100-80gb", None, "how many are there? Add --devices 16"),
        ("a100-80gb:16,h100-80gb", None, "each kind needs a number of devices from 1 up"),
        ("a100-80gb:0,h100-80gb:8", None, "each kind needs a number of devices from 1 up"),
        ("a100-80gb:8,a100-80gb:8", None, "a100-80gb is named twice. Name it once, with the sum"),
        ("a100-80gb:16,h100-80gb:8", 16, "--devices 16 with --hardware a100-80gb:16,h100-80gb:8: these"),
        ("a100-80gb:16,tpu:8", None, "hardware='tpu': neither a file"),
        ("a100-80gb:many", None, "each kind needs a number"),
    ],
)
def test_clusters_that_are_refused(source: str, devices: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        cluster.load(source, devices)


def test_json_says_which_set_stands_where(capsys: pytest.CaptureFixture[str]) -> None:
    command.run([*ASKED, "--hardware", "a100-80gb:8,h100-80gb:8", "--json"])
    mixed = json.loads(capsys.readouterr().out)
    assert {pool["hardware"] for pool in mixed["mapping"]} == {"a100-80gb", "h100-80gb"}
    for stage, seconds in mixed["stages_s"].items():
        work = [[by.get(stage, {"seconds": 0.0}) for by in p["layouts"].values()] for p in mixed["mapping"]]
        assert max(sum(one["seconds"] for one in pool) for pool in work) == pytest.approx(seconds)
    speeds = {}
    for name in ("a100-80gb", "h100-80gb"):
        command.run([*ASKED, "--hardware", name, "--devices", "8", "--json"])
        alone = json.loads(capsys.readouterr().out)
        assert [pool["hardware"] for pool in alone["mapping"]] == [name] * len(alone["mapping"])
        speeds[name] = alone["tokens_per_s"]
    assert mixed["tokens_per_s"] > max(speeds.values())
    assert mixed["baselines"]["colocated"] == pytest.approx(speeds["h100-80gb"], rel=0.01)


def test_text_names_kinds(rlhf: Rlhf, tmp_path: Path) -> None:
    asked = ("map", *ASKED, "--hardware", "a100-80gb:16,h100-80gb:1", "--top", "1")
    picture = tmp_path / "mixed.svg"
    code, out, err = rlhf.run(*asked, "--picture", str(picture))
    assert (code, err) == (0, "")
    assert out.startswith("ppo on 16 x a100-80gb and 1 x h100-80gb: ")
    assert "1 x h100-80gb stay idle" in out or "devices: 1}  # h100-80gb" in out
    assert "  # a100-80gb" in out
    assert picture.stat().st_size > 1000


def test_what_does_not_fit_on_any_kind(rlhf: Rlhf) -> None:
    asked = ("map", "--algo", "ppo", "--model", "llama-70b", "--hardware", "a100-80gb:2,h100-80gb:1")
    said = rlhf.refused(*asked)
    assert said.startswith("no division of the models over 2 x a100-80gb and 1 x h100-80gb holds them. ")
    assert said.count("the smallest cluster that holds these models has") == 2
    assert "--hardware h100-80gb:12: h100-80gb has nodes of 8" in rlhf.refused(
        "map", *ASKED, "--hardware", "a100-80gb:8,h100-80gb:12"
    )


@pytest.mark.parametrize(
    ("option", "role"), [("--critic", "critic"), ("--reference", "reference"), ("--model", "actor")]
)
def test_a_role_without_a_model_is_one_that_scores(option: str, role: str, rlhf: Rlhf) -> None:
    asked = ("map", "--algo", "ppo", "--model", "llama-7b", "--hardware", "a100-80gb:8", option, "none")
    assert f"{option} none: {role} is a model, and only rewards and costs" in rlhf.refused(*asked)
