"""verl 0.5.0's RayPPOTrainer at its best on a CPU: GRPO or PPO, one epoch, one update an iteration.

The last verl that generates with Hugging Face's `generate`; verl_workers.py says what is changed for a CPU.
Colocated workers, as in verl's examples: a process a device, in which FSDP shards what it trains.
"""

import os
from collections.abc import Mapping
from typing import Any

import ray
import torch
import verl_workers
from hydra import compose, initialize_config_module
from iterations import Run, Stopwatch, from_command_line
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from verl import DataProto
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
from verl.utils import tracking
from verl.utils.dataset.rl_dataset import collate_fn
from workload import (
    KL,
    LEARNING_RATE,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    SEQUENCES,
    read_prompts,
    reward,
    samples_per_prompt,
)

PRECISION = {
    "float32": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    "bfloat16": "{param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}",
}
ACTOR, REFERENCE, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))


class Devices(ResourcePoolManager):
    """Processes without GPUs."""

    def create_resource_pool(self) -> None:
        """One pool, all models in each of its processes."""
        for name, processes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=processes, use_gpu=False, max_colocate_count=1, name_prefix=name
            )


class Prompts(Dataset[dict[str, Any]]):
    """The workload's prompts as verl's trainer reads them: padded on the left to PROMPT_TOKENS."""

    def __init__(self, run: Run, words: PreTrainedTokenizerBase) -> None:
        """Encode all."""
        self.rows = words(
            read_prompts(run.workload.prompts),
            padding="max_length",
            max_length=PROMPT_TOKENS,
            return_tensors="pt",
            return_token_type_ids=False,
        )

    def __len__(self) -> int:
        """How many there are."""
        return len(self.rows["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One prompt."""
        ids, mask = self.rows["input_ids"][index], self.rows["attention_mask"][index]
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(0) - 1).clamp(min=0),
            "raw_prompt_ids": ids[mask.bool()].tolist(),
            "index": index,
        }


class Rule:
    """The workload's reward in verl's form, which notes the tokens of what it scores."""

    def __init__(self, watch: Stopwatch, words: PreTrainedTokenizerBase) -> None:
        """Note on `watch`."""
        self.watch, self.words = watch, words

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | Mapping[str, Tensor]:
        """Scores [B, R] float32, each row's at its last token."""
        mask = data.batch["attention_mask"]
        lengths = mask[:, -RESPONSE_TOKENS:].sum(dim=1).tolist()
        self.watch.note(int(mask[:, :-RESPONSE_TOKENS].sum()), lengths)
        rows = zip(data.batch["responses"].tolist(), lengths, strict=True)
        texts = self.words.batch_decode([row[:length] for row, length in rows], skip_special_tokens=True)
        scores = torch.zeros(data.batch["responses"].shape)
        scores[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = torch.tensor(reward(texts))
        return {"reward_tensor": scores} if return_dict else scores


class Laps:
    """In place of verl's loggers, which are told of the end of every iteration."""

    def __init__(self, watch: Stopwatch) -> None:
        """Note the ends on `watch`."""
        self.watch = watch

    def log(self, data: Mapping[str, object], step: int, **_: object) -> None:
        """An iteration ended."""
        self.watch.lap()


def options(run: Run) -> list[str]:
    """What differs from verl's configuration."""
    samples, ppo = samples_per_prompt(run.algo), run.algo == "ppo"
    prompts, micro = SEQUENCES // samples, SEQUENCES // run.processes // run.micro_batches
    precision = PRECISION[run.dtype]
    return [
        "trainer.device=cpu",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={run.processes}",
        "trainer.total_epochs=1000",
        f"trainer.total_training_steps={run.warmup + run.iterations}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[]",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={RESPONSE_TOKENS}",
        "data.dataloader_num_workers=0",
        f"algorithm.adv_estimator={'gae' if ppo else 'grpo'}",
        "algorithm.lam=0.95",
        f"algorithm.use_kl_in_reward={ppo}",
        f"algorithm.kl_ctrl.kl_coef={KL}",
        f"actor_rollout_ref.model.path={run.workload.model}",
        "+actor_rollout_ref.model.override_config.pad_token_id=null",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{ACTOR}.ppo_mini_batch_size={prompts}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro}",
        f"{ACTOR}.optim.lr={LEARNING_RATE}",
        f"{ACTOR}.use_torch_compile=false",
        f"{ACTOR}.use_kl_loss=false",
        f"+{ACTOR}.fsdp_config.mixed_precision={precision}",
        f"{REFERENCE}.log_prob_micro_batch_size_per_gpu={micro}",
        f"+{REFERENCE}.fsdp_config.mixed_precision={precision}",
        f"+{REFERENCE}.fsdp_config.model_dtype={'fp32' if run.dtype == 'float32' else 'bf16'}",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.n={samples}",
        f"{ROLLOUT}.temperature=1.0",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={micro}",
        f"critic.model.path={run.workload.model}",
        "critic.model.enable_gradient_checkpointing=false",
        f"critic.ppo_mini_batch_size={prompts}",  # else the actor's, which its worker has divided by then
        f"critic.ppo_micro_batch_size_per_gpu={micro}",
        f"critic.optim.lr={LEARNING_RATE}",
        f"+critic.model.fsdp_config.mixed_precision={precision}",
    ]


def configuration(run: Run) -> DictConfig:
    """All of it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=options(run))


def train(run: Run, watch: Stopwatch) -> None:
    """Train `run.warmup + run.iterations` iterations; every process has one of the threads that are given."""
    config = configuration(run)
    words = AutoTokenizer.from_pretrained(run.workload.model, padding_side="left")
    roles = {Role.ActorRollout: ray.remote(verl_workers.Actor)}
    if config.algorithm.adv_estimator == "gae":
        roles[Role.Critic] = ray.remote(verl_workers.Critic)
    if config.algorithm.use_kl_in_reward:
        roles[Role.RefPolicy] = ray.remote(verl_workers.Actor)
    rows, rule = Prompts(run, words), Rule(watch, words)
    trainer = RayPPOTrainer(
        config=config,
        tokenizer=words,
        role_worker_mapping=roles,
        resource_pool_manager=Devices({"all": [run.processes]}, dict.fromkeys(roles, "all")),
        ray_worker_group_cls=RayWorkerGroup,
        reward_fn=rule,
        train_dataset=rows,
        val_dataset=rows,
        collate_fn=collate_fn,
        train_sampler=RandomSampler(rows, generator=torch.Generator().manual_seed(run.seed)),
    )
    trainer.init_workers()
    trainer.fit()


def main() -> None:
    """Train, time and print.

    Raises:
        RuntimeError: the iterations are not those of the workload.
    """
    run, watch = from_command_line(), Stopwatch()
    os.environ.update({verl_workers.DTYPE: run.dtype, verl_workers.SEED: str(run.seed)})
    tracking.Tracking = lambda **_: Laps(watch)
    ray.init(num_cpus=run.processes + 2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        train(run, watch)
    finally:
        ray.shutdown()
    found = watch.measured(run)
    found.check(run)
    print(found.as_json())


if __name__ == "__main__":
    main()
