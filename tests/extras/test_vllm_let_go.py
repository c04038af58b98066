"""A run whose generator is vLLM lets go of its engines, also where it was the first to import vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import gc, sys
from pathlib import Path
from rlhf_lightning.algos import GRPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import VLLM, FSDPEngine
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward, Settings
from tests.unit.algos.short import trainer

assert "vllm.v1.engine.llm_engine" not in sys.modules, "nothing is shown"
strategy = Local(settings=Settings(generator="vllm", vllm=VLLM(kv_cache_gib=0.02, max_num_seqs=16)))
actor, reward = Actor(sampling=Sampling(max_new_tokens=2)), Reward(functions={"length": 1.0})
algorithm = GRPO(actor=actor, reward=reward, group_size=2)
data = TaskData(batch_size=2, num_rows=4, num_val_rows=2)
trainer(strategy, Path(sys.argv[1])).fit(algorithm, datamodule=data)
del strategy, actor, reward, algorithm
gc.collect()
from rlhf_lightning.engines.vllm.engine import VLLMEngine
from vllm.distributed import parallel_state
assert (parallel_state._TP, parallel_state._WORLD) == (None, None), "they would keep the groups"
print("left:", sum(isinstance(held, VLLMEngine | FSDPEngine) for held in gc.get_objects()))
"""


def test_a_run_that_imports_vllm_lets_go_of_its_engines(tmp_path: Path) -> None:
    """As in a notebook: the next run needs their memory, and vLLM sleeps once in a process."""
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "left: 0" in run.stdout, run.stdout
