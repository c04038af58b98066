"""A Ray of the job's own that does not come up."""

from __future__ import annotations

import pytest
import ray

from rlhf_lightning.controller import WorkerTimeoutError
from rlhf_lightning.controller.connection import start_ray


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (
            Exception("The current node timed out."),
            "Ray did not start on this machine: The current node timed",
        ),
        (RuntimeError("another"), "another"),
    ],
)
def test_a_node_that_is_late_is_told(theirs: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(**_: object) -> None:
        raise theirs  # as Ray's node.py does, 30 seconds after it has started its processes

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises((WorkerTimeoutError, RuntimeError), match=f"^{told}"):
        start_ray(1)
