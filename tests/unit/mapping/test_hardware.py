"""Clusters as data: the files of users, and what is refused."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from rlhf_lightning.mapping import hardware, machine
from rlhf_lightning.mapping.machine import this_machine

pytestmark = pytest.mark.unit


def test_a_saved_file_is_read_back(tmp_path: Path) -> None:
    hardware.save(hardware.H200, tmp_path / "mine.yaml")
    assert hardware.load(str(tmp_path / "mine.yaml")) == hardware.H200


def test_a_users_file_needs_no_more_than_the_numbers_of_a_data_sheet(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "name: mine\ngpus_per_node: 4\nmemory_bytes: 48e9\nmemory_bandwidth: 8.0e+11\npeak_flops: 150e12\n"
        "intra_bandwidth: 32e9\ninter_bandwidth: 12.5e9\nefficiency: {matmul: 0.5}\n"
    )
    mine = hardware.load(str(tmp_path / "mine.yaml"))
    assert (mine.memory_bytes, mine.peak_flops, mine.efficiency.matmul) == (48e9, 150e12, 0.5)
    assert mine.efficiency.kv == hardware.Efficiency().kv


@pytest.mark.parametrize("rest", ["", "efficiency:\noverhead:\n", "efficiency: {}\noverhead: []\n"])
def test_a_data_sheet_alone_has_the_shares_and_overheads_of_known_gpus(tmp_path: Path, rest: str) -> None:
    path, values = tmp_path / "mine.yaml", dataclasses.asdict(hardware.A100)
    del values["efficiency"], values["overhead"]
    path.write_text(yaml.safe_dump(values) + rest)
    assert hardware.load(str(path)) == hardware.A100
    path.write_text(yaml.safe_dump({**values, "overhead": {"call": 0.0}}))
    mine = hardware.load(str(path))
    assert mine.overhead == dataclasses.replace(hardware.A100.overhead, call=0.0)


def test_an_a100_has_nvlink_in_one_direction_and_one_network_card_a_node() -> None:
    a100 = hardware.load("a100-80gb")
    assert (a100.gpus_per_node, a100.intra_bandwidth, a100.inter_bandwidth) == (8, 600e9 / 2, 200e9 / 8)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'b200'.*a100-80gb, h100-80gb, h200-141gb, cpu"):
        hardware.load("b200")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_per_node": 8}, "'gpu_per_node' is unknown. Hardware has name, gpus_per_node"),
        ({"memory_bandwidth": -1.0}, "memory_bandwidth=-1.0: must be positive"),
        ({"efficiency": {"matmul": 70}}, "matmul=70: is a share"),
        ({"overhead": {"layer": -1.0}}, "layer=-1.0: must not be negative"),
        ({"efficiency": {"matmult": 0.7}}, "'matmult' is unknown. Efficiency has matmul"),
        ({"efficiency": 3}, r"mine\.yaml: efficiency is 3, and has to hold keys of its own"),
        ({"gpus_per_node": 1.5}, r"mine\.yaml: gpus_per_node is 1\.5, and has to be a whole number"),
        ({"peak_flops": None}, "peak_flops is None, and has to be a number"),
        ({"peak_flops": "abc"}, "peak_flops is 'abc', and has to be a number"),
        ({"memory_bytes": float("inf")}, "memory_bytes is inf, and has to be a number"),
        ({"memory_bytes": 80}, r"mine\.yaml: memory_bytes is 80, and has to be in bytes, such as 80e9"),
        ({"memory_bytes": 81920}, "memory_bytes is 81920, and has to be in bytes"),
        ({"memory_bandwidth": 2039.0}, "is 2039.0, and has to be in bytes a second, such as 2e12"),
        ({"peak_flops": 312}, "peak_flops is 312, and has to be in FLOP a second, such as 312e12"),
        ({"inter_bandwidth": 25}, "inter_bandwidth is 25, and has to be in bytes a second, such as 25e9"),
        ({"intra_bandwidth": "300"}, "intra_bandwidth is '300', and has to be in bytes a second"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**dataclasses.asdict(hardware.A100), **change}))
    with pytest.raises(ValueError, match=message):
        hardware.load(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: mine\ngpus_per_node: 4\nmemory_bytes: 48.0e+9\n",
            "lacks memory_bandwidth, peak_flops, intra_bandwidth, inter_bandwidth",
        ),
        ("a: [1\nb: }", r"mine\.yaml, line 2: is not YAML: expected ',' or ']'"),
        (
            "name: mine\nmemory_bytes: 48e9\nmemory_bytes: 24e9\n",
            r"mine\.yaml, line 3: is not YAML: memory_bytes stands there twice",
        ),
    ],
    ids=["without a bandwidth", "no YAML", "a key twice"],
)
def test_a_text_that_is_no_description_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (path := tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        hardware.load(str(path))


def test_a_machine_with_gpus_is_described_with_its_own_number_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=42 * 10**9)
    )
    found = this_machine(4)
    assert (found.memory_bytes, found.gpus_per_node) == (42e9, 4)
    assert found.peak_flops == hardware.KNOWN["a100-80gb"].peak_flops


def test_devices_of_a_machine_without_gpus_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "host_memory", lambda: 24e9)
    assert this_machine(4) == dataclasses.replace(hardware.CPU, memory_bytes=6e9, gpus_per_node=4)


def test_whole_numbers_may_have_a_point(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**dataclasses.asdict(hardware.A100), "gpus_per_node": 8.0}))
    assert hardware.load(str(path)) == hardware.A100


def test_the_documents_have_a_machine_that_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "mapping.md").read_text()
    path = tmp_path / "l40s.yaml"
    path.write_text(text.partition("```yaml\n")[2].partition("```")[0])
    l40s = hardware.load(str(path))
    assert (l40s.memory_bytes, l40s.inter_bandwidth, l40s.efficiency.matmul) == (48e9, 25e9, 0.6)
