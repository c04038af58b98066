"""verl 0.5.0's workers on a CPU: gloo for NCCL, SDPA for FlashAttention, and float32 where it is asked for.

Importing this changes what the workers find in verl, torch and transformers, in the process that imports it:
Ray's actors do when they look up these classes. The controller must, too.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import open_dict
from torch.distributed import fsdp
from torch.distributed.fsdp import _init_utils
from transformers import AutoConfig, AutoModelForTokenClassification
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

DTYPE = "VERL_WORKERS_DTYPE"
"""Environment variable: what models compute in."""
SEED = "VERL_WORKERS_SEED"
"""Environment variable: of what is drawn, for which verl has no option."""
THERE_IS_NONE = (
    "empty_cache",
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
)
"""What verl asks of any device, and torch.cpu lacks."""


def _with_sdpa(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loaded(*args: object, **options: object) -> object:
        if options.get("attn_implementation") == "flash_attention_2":
            options["attn_implementation"] = "sdpa"
        return load(*args, **options)

    return loaded


for _name in THERE_IS_NONE:
    setattr(torch.cpu, _name, lambda *_: 0)
torch.cpu.mem_get_info = lambda *_: (0, 0)
torch.cpu.get_device_name = lambda *_: "cpu"
# A CPU's parameters are there, and need no pinned copy.
fsdp.CPUOffload = lambda **_: None
# It asks for parameters on a GPU, which gloo does not need.
_init_utils._check_module_states_for_sync_module_states = lambda _: None
if os.environ.get(DTYPE) == "float32":
    torch.autocast = functools.partial(torch.autocast, enabled=False)  # type: ignore[misc,assignment]
for _loader in (AutoConfig, AutoModelForTokenClassification):
    _loader.from_pretrained = _with_sdpa(_loader.from_pretrained)


def _join() -> None:
    """The process group that verl would make with NCCL; it takes one that is there."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


class Actor(ActorRolloutRefWorker):
    """Actor, generation and reference."""

    def __init__(self, config: Any, role: str, **options: object) -> None:  # noqa: ANN401
        """Join the others first."""
        _join()
        super().__init__(config, role, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load; the trainer has repeated the prompts, and generation would once more.

        The tokenizer tells generation which tokens pad and end: the model has none in the fixed workload.
        It comes last of all models, so that what it draws next is of the seed.
        """
        super().init_model()
        self.generation_config = None
        if self._is_rollout:
            self.rollout.config = self.rollout.config.copy()
            with open_dict(self.rollout.config):
                self.rollout.config.n = 1
        torch.manual_seed(1000 * int(os.environ[SEED]) + dist.get_rank())


class Critic(CriticWorker):
    """Values."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        """Join the others first."""
        _join()
        super().__init__(config)
