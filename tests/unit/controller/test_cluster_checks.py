"""Where a job finds its Ray, and what is refused before it connects."""

from __future__ import annotations

import logging
import os
import resource
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray
import torch
from ray._private import services

from rlhf_lightning.controller import cluster, connection
from rlhf_lightning.controller.cluster import RayCluster

TIMEOUT_S = 10.0


@pytest.mark.parametrize(
    ("environment", "gpus", "up", "begun"),
    [
        ("", 0, False, ["start 99"]),
        ("local", 99, False, ["start 99"]),
        ("10.0.0.1:6379", 1, False, ["check 10.0.0.1:6379 RAY_ADDRESS", "join 10.0.0.1:6379 RAY_ADDRESS"]),
        ("10.0.0.1:6379", 1, True, []),
        ("", 1, True, []),
    ],
)
def test_where_a_job_finds_its_ray(
    monkeypatch: pytest.MonkeyPatch, environment: str, gpus: int, *, up: bool, begun: list[str]
) -> None:
    told = list[str]()
    monkeypatch.setenv("RAY_ADDRESS", environment)
    monkeypatch.setattr(ray, "is_initialized", lambda: up)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(cluster, "usable_cores", lambda: 4)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 99})
    for name, word in (("start_ray", "start"), ("join", "join"), ("check_address", "check")):
        monkeypatch.setattr(
            cluster, name, lambda *given, word=word: told.append(" ".join(map(str, (word, *given))))
        )
    RayCluster(None, timeout_s=TIMEOUT_S).connect(99)
    assert told == begun


def test_what_ray_warns_of_as_it_starts_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store of a container with a /dev/shm of 64 MiB is on its disk, and `auto` may find two clusters."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1})
    with caplog.at_level(logging.ERROR, "ray"), caplog.at_level(logging.NOTSET, services.logger.name):
        assert not services.logger.isEnabledFor(logging.WARNING)
        RayCluster(None, timeout_s=TIMEOUT_S).connect(1)
        assert services.logger.isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(
    ("address", "environment", "refused"),
    [
        ("10.0.0.1:6379", "", True),
        ("127.0.0.1:5", "", False),
        ("auto", "", False),
        ("local", "", False),
        (None, "10.0.0.1:6379", False),
    ],
)
def test_an_address_other_than_that_of_the_ray_connected_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str | None, environment: str, *, refused: bool
) -> None:
    context = SimpleNamespace(gcs_address="127.0.0.1:5")
    monkeypatch.setenv("RAY_ADDRESS", environment)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1})
    said = r"^strategy\.address='10\.0\.0\.1:6379': .* to the Ray at 127\.0\.0\.1:5\. Call ray\.shutdown"
    with pytest.raises(ValueError, match=said) if refused else nullcontext():
        RayCluster(address, timeout_s=TIMEOUT_S).connect(1)


def test_more_devices_than_this_machine_has_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cluster, "start_ray", lambda _: None)
    with pytest.raises(ValueError, match=r"^the pools need 3 devices, and there are 2 GPUs\. Try --strategy"):
        RayCluster("local", timeout_s=TIMEOUT_S).connect(3)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("/scratch/job 7", None),
        ("/" + "x" * 38, None),
        ("/" + "x" * 39, r"has 40 characters, and room for 39"),
        ("/scratch/ä", r"is not ASCII"),
    ],
)
@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_directory_in_which_ray_can_make_no_socket_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, folder: str, said: str | None
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(os, "getpid", lambda: 1234567)
    monkeypatch.setattr(cluster, "start_ray", lambda _: None)
    monkeypatch.setenv("TMPDIR", "/short")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(name, folder)
    wrong = rf"^{name}={folder}: {said}: Ray makes its sockets there\. Set RAY_TMPDIR=/tmp\.$"
    with pytest.raises(ValueError, match=wrong) if said else nullcontext():
        RayCluster("local", timeout_s=TIMEOUT_S).connect(1)


@pytest.mark.parametrize("letter", ["v", "f"])
@pytest.mark.parametrize(("limit_gb", "refused"), [(6, True), (20, False), (None, False)])
def test_a_limit_of_memory_or_files_below_rays_store_is_refused(
    monkeypatch: pytest.MonkeyPatch, letter: str, limit_gb: int | None, refused: bool
) -> None:
    """Its core would abort this process, with a trace of C++, or wait a minute for the store."""
    limit = resource.RLIM_INFINITY if limit_gb is None else (limit_gb << 30) - 1024
    kind = resource.RLIMIT_AS if letter == "v" else resource.RLIMIT_FSIZE
    limits = {kind: (limit, resource.RLIM_INFINITY)}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection, "estimate_available_memory", lambda: 0)
    monkeypatch.setattr(connection, "resolve_object_store_memory", lambda _: 6 << 30)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, (resource.RLIM_INFINITY,) * 2))
    monkeypatch.setattr(cluster, "start_ray", lambda _: None)
    wrong = rf"^ulimit -{letter} is 6291455: .* file of 6\.0 GiB, .* Type `ulimit -{letter} unlimited`"
    with pytest.raises(ValueError, match=wrong) if refused else nullcontext():
        RayCluster("local", timeout_s=TIMEOUT_S).connect(1)
