"""Options of the DeepSpeed engine, and DeepSpeed's own configuration made from them; imports no DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, Literal

from rlhf_lightning.engines.fsdp.config import FSDP
from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.train_config import TrainConfig
from rlhf_lightning.parallel import ParallelLayout, Sharding
from rlhf_lightning.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ZeRO(TrainConfig):
    """Options of the DeepSpeed engine (ZeRO, Rajbhandari 2020, section 5).

    Raises:
        ValueError: a value is outside its range, or contradicts another.
    """

    option: ClassVar[str] = "strategy.settings.zero"
    masters_beside: ClassVar[bool] = True

    stage: Literal[1, 2, 3] = 2
    """What is sharded over the ranks: 1 masters and moments, 2 gradients too, 3 parameters too."""
    offload_optimizer: bool = False
    """Keep masters and moments on the host, and step there."""
    offload_parameters: bool = False
    """Keep a rank's shard of the parameters on the host while no layer needs it; only with stage 3."""
    bucket_numbers: int = 1 << 26
    """Most numbers (not bytes) that are reduced or gathered at once."""
    whole_below: int = 100_000
    """Parameters with fewer numbers stay whole on every rank, but from a scoring pass, or a load, to the next
    update; only with stage 3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.whole_below < 0:
            raise ValueError(f"strategy.settings.zero.whole_below={self.whole_below}: is negative. Try 0.")
        if self.stage not in (1, 2, 3):
            raise ValueError(f"strategy.settings.zero.stage={self.stage}: ZeRO has stages 1, 2 and 3. Try 2.")
        if self.bucket_numbers < 2 or self.bucket_numbers % 2:
            raise ValueError(
                f"strategy.settings.zero.bucket_numbers={self.bucket_numbers}: must be even and above 0. "
                f"Try {1 << 26}."
            )
        if self.offload_parameters and self.stage != 3:
            raise ValueError(
                f"strategy.settings.zero.offload_parameters with stage={self.stage}: only stage 3 divides "
                "the parameters. Try stage=3."
            )

    @classmethod
    def require(cls) -> None:
        """See `TrainConfig.require`."""
        if find_spec("deepspeed") is None:
            raise ValueError(
                "strategy.settings.engine=zero: DeepSpeed is not installed. Try: "
                "pip install 'rlhf-lightning[deepspeed]'; or --strategy.settings.engine fsdp under a "
                "strategy that takes it, such as colocated."
            )

    def check(self, spec: ModelSpec, head: Head, layout: ParallelLayout) -> None:
        """See `TrainConfig.check`: only data parallelism is possible."""
        if layout.p * layout.t > 1:
            raise ValueError(
                f"strategy.settings.engine=zero with train p={layout.p}, t={layout.t}: under ZeRO every rank "
                "computes the whole model. Try p=1 and t=1, or engine=megatron."
            )

    @property
    def sharding(self) -> Sharding:
        """See `TrainConfig.sharding`."""
        stages: dict[int, Sharding] = {1: "states", 2: "gradients", 3: "full"}
        return stages[self.stage]

    def for_frozen(self) -> FSDP:
        """The FSDP options for frozen models: whole copies, or in stage 3 sharded as finely."""
        shard = 0 if self.stage == 3 else 1
        return FSDP(shard=shard, max_tokens_per_micro_batch=self.max_tokens_per_micro_batch)

    def for_deepspeed(self, spec: ModelSpec, *, numbers: int, on_cpu: bool) -> dict[str, object]:
        """DeepSpeed's own configuration.

        Args:
            spec: the model, and how it is optimised.
            numbers: how many the model has; buckets are not larger.
            on_cpu: whether the ranks compute on CPUs.
        """
        bucket = min(self.bucket_numbers, numbers + numbers % 2)
        host = {"device": "cpu", "pin_memory": not on_cpu}
        memory: dict[str, object] = {
            "stage": self.stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": self.whole_below,
            "overlap_comm": self.stage == 3 and not on_cpu,
            "memory_efficient_linear": False,  # it would replace torch's linear for the whole process
        }
        memory |= {"offload_optimizer": host} if self.offload_optimizer else {}
        memory |= {"offload_param": host} if self.offload_parameters else {}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,  # a step ends any number of backward passes
            "gradient_clipping": spec.optimizer.grad_clip,
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": []},
            "bf16": {"enabled": spec.computes_in == "bfloat16", "check_grad_overflow": True},
            "steps_per_print": None,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # it is compiled on first use
            "zero_optimization": memory,
        }
