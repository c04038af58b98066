"""What shows only where nothing has imported DeepSpeed or vLLM yet: what they say, change, and hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import gc, os, sys
from pathlib import Path
from rlhf_lightning.algos import GRPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import VLLM, FSDPEngine
from rlhf_lightning.spec import ModelSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward, Settings
from tests.unit.algos.short import trainer

before = dict(os.environ)
FSDPEngine(ModelSpec()).export(Path(sys.argv[1], "export"))
assert "deepspeed" in sys.modules, "nothing is shown"
print("environment:", "as before" if os.environ == before else "changed")

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


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """By a process that saves a model, and then has vLLM generate."""
    command = [sys.executable, "-c", CODE, str(tmp_path_factory.mktemp("run"))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def test_deepspeed_says_nothing_of_a_host_without_a_gpu(said: str) -> None:
    """Transformers imports it where it saves a model."""
    assert "environment: as before" in said
    assert "Setting accelerator to CPU" not in said


def test_a_run_that_imports_vllm_lets_go_of_its_engines(said: str) -> None:
    """As in a notebook: the next run needs their memory, and vLLM sleeps once in a process."""
    assert "left: 0" in said, said
