"""Devices killed in the middle of a call, an answer or a weight transfer: one message, and nothing left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ray.held import SOON_S, Doing, assert_one_message, itself, killed_within, the_other, write_held

CASES = {
    "actor answers": ("colocated", "answering", itself, r"actor\[rank 0, device 0\]\.generate_sequences"),
    "generator answers": (
        "openrlhf",
        "answering",
        itself,
        r"generator\[rank 0, device 1\]\.generate_sequences",
    ),
    "actor sends": ("openrlhf", "sending", itself, r"actor\[rank 0, device 0\]\.send_weights"),
    "generator receives": (
        "openrlhf",
        "sending",
        the_other,
        r"generator\[rank 0, device 1\]\.receive_weights",
    ),
}
"""Strategy, what the device does when it stops, who is killed then, and what is named."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "held", "victim", "name"), CASES.values(), ids=CASES)
def test_a_killed_device_ends_the_run(
    cluster: str,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    strategy: str,
    held: Doing,
    victim: Callable[[int], int],
    name: str,
) -> None:
    config = write_held(tmp_path, tiny, held)
    killed_within(SOON_S, config, f"--strategy {strategy}", victim=victim)
    assert_one_message(capsys.readouterr().err, name)
