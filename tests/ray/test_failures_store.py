"""A full object store: who is named, with how many bytes, and that it is free again afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.conftest import ROOT
from tests.ray.crammed import STORE_MIB

SOON_S = 30.0


def test_a_full_object_store_names_the_call_and_the_bytes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ray.crammed"],
        env={**os.environ, "RAY_ADDRESS": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Unhandled error" not in done.stderr
    found = {name: (error, seconds) for name, error, seconds in map(json.loads, done.stdout.splitlines())}
    assert all(seconds < SOON_S for _, seconds in found.values()), found
    what = {
        "one_result": "large[rank 0, device 0].grown: no room for its columns of 100.0 MiB in ",
        "results_together": "large[rank 0, device 0].grown: no room for its columns of 31.0 MiB in ",
        "given": "large.double: handing a column to the devices: no room for 100.0 MiB of the controller in ",
    }
    for name, begins in what.items():
        error = found[name][0]
        assert error.startswith(begins), error
        assert f"object store of {STORE_MIB} MiB, nor on the disk" in error
        assert "Take a smaller --data.batch_size" in error
        assert "Traceback" not in error
    assert found["afterwards"][0] == ""
