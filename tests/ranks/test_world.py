"""What a process keeps once it has joined the world."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RECORDER = "TORCH_FR_BUFFER_SIZE"


@pytest.mark.parametrize(("given", "kept"), [(None, 0), ("2000", 1)])
def test_collectives_of_gloo_are_kept_for_nobody_unless_asked_for(given: str | None, kept: int) -> None:
    code = (
        "import pickle, torch, torch.distributed as dist\n"
        "from rlhf_lightning.parallel import World, WorldSpec\n"
        "World.join(0, WorldSpec(size=1, address='', groups=((0,),), timeout_s=77.0), gpu=False)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "print(len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace())['entries']))\n"
        "World.leave()\n"  # gloo's threads may still hold the tensor: to free it as Python ends is to abort
    )
    variables = {name: value for name, value in os.environ.items() if name != RECORDER}
    variables |= {RECORDER: given} if given else {}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert int(done.stdout) == kept
