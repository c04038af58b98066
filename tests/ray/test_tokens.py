"""Clusters that ask for a token: joined with the one that this user has, refused soon without."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TOKEN = "0123456789abcdef" * 4
HEAD = """
import sys
from ray.cluster_utils import Cluster
nodes = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False})
print(nodes.address, flush=True)
sys.stdin.read()
nodes.shutdown()
"""
JOIN = """
import sys, ray
from rlhf_lightning.controller.cluster import RayCluster
cluster = RayCluster(sys.argv[1], timeout_s=60)
cluster.connect(1)
@ray.remote
class Echo:
    def size(self, refs):
        return len(ray.get(refs[0]))
print(ray.get(Echo.remote().size.remote([ray.put(bytes(10**6))]), timeout=60))
cluster.close()
"""
"""A controller, and a device that reads something of it."""
SOON_S = 15.0
"""Ray alone tries for 20 seconds."""


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster that asks for TOKEN."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    environment["RAY_TMPDIR"] = str(tmp_path_factory.mktemp("r"))
    with subprocess.Popen(
        [sys.executable, "-c", HEAD],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        yield head.stdout.readline().strip()
        head.stdin.close()


def joined(address: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run JOIN as a user with a home, and with these variables of authentication alone."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return subprocess.run(
        [sys.executable, "-c", JOIN, address],
        env={**others, "HOME": str(home), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of a user for whom Ray has written a token."""
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text(TOKEN)
    return tmp_path


def test_the_token_of_this_user_is_taken(asking: str, home: Path) -> None:
    done = joined(asking, home)
    assert (done.returncode, done.stdout) == (0, "1000000\n"), done.stderr
    assert "Token" not in done.stderr


def test_a_cluster_that_asks_for_none_is_joined_without(cluster: str, home: Path) -> None:
    done = joined(cluster, home)
    assert (done.returncode, done.stdout) == (0, "1000000\n"), done.stderr


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="there-is-none"),
        pytest.param({"RAY_AUTH_MODE": "token"}, id="one-is-asked-for-here-and-there"),
        pytest.param({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN[::-1]}, id="it-is-another"),
    ],
)
def test_what_is_missing_is_said_soon(asking: str, tmp_path: Path, variables: dict[str, str]) -> None:
    began = time.monotonic()
    done = joined(asking, tmp_path, **variables)
    assert time.monotonic() - began < SOON_S
    assert done.returncode == 1
    assert f"ValueError: strategy.address='{asking}': the cluster asks for a token" in done.stderr
