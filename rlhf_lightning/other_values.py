"""What values of options of TRL, verl and OpenRLHF are called here, and flags that a value turns off."""

from __future__ import annotations

import re

from rlhf_lightning.other_systems import KL_STAYS, names_within, of_role

_OFF = "It is off here: leave it out."
_WITH_BASELINE = "Type --algo reinforcepp --algo.group_size N, with an N above 1."
_TOKENS = "Type --algo.policy_loss.aggregation token-mean."
_BFLOAT16 = "Type --algo.actor.dtype bfloat16."
_NO_LOSS = "There is no such loss here; docs/own_losses.md says how to write one."
_WANDB = "Type --trainer.logger WandbLogger --trainer.logger.project NAME; the console needs nothing."
_FALLING = (
    "Type --algo.actor.optimizer.schedule cosine --algo.actor.optimizer.total_steps N "
    "--algo.actor.optimizer.min_lr_ratio R."
)

_HERE: dict[str, dict[str, str]] = {
    (
        "val_before_train eval_on_start log_completions filter_groups.enable dynamic_filtering_enable "
        "dynamic_filtering multi_turn.enable overlong_buffer.enable overlong_buffer_cfg.enable "
        "reward_model.enable normalize_enable normalize_reward sync_ref_model "
        "vllm_importance_sampling_correction is_correction_enable"
    ): {"false": _OFF},
    "use_peft": {"false": _OFF, "true": "Type --algo.actor.lora.rank N."},
    "use_kl_loss use_loss": {
        "false": "Type --algo.policy_loss.kl_coef 0.",
        "true": f"Type --algo.policy_loss.kl_coef N, which is also what turns it on, and {KL_STAYS}",
    },
    "use_kl_in_reward": {
        "false": "Type --algo.reward_kl_coef 0, of PPO --algo.kl.coef 0.",
        "true": "Type --algo.reward_kl_coef N, of PPO --algo.kl.coef N, which is also what turns it on.",
    },
    "kl_loss_type kl_estimator": {
        "low_var_kl": "Type --algo.policy_loss.kl_estimator k3.",
        "mse": "Type --algo.policy_loss.kl_estimator k2.",
        "kl": "Type --algo.policy_loss.kl_estimator k1.",
    },
    "kl_penalty kl.estimator": {
        "low_var_kl": "Type --algo.kl.estimator k3.",
        "mse": "Type --algo.kl.estimator k2.",
        "kl": "Type --algo.kl.estimator k1.",
    },
    "adv_estimator advantage_estimator advantage.estimator": {
        "gae": "Type --algo ppo.",
        "grpo group_norm": "Type --algo grpo.",
        "dr_grpo": "Type --algo grpo --algo.scale none.",
        "reinforce reinforce_plus_plus": "Type --algo reinforcepp.",
        "reinforce_baseline reinforce_plus_plus_baseline": _WITH_BASELINE,
        "rloo remax opo": "Type --algo {}.",
    },
    "loss_mode policy_loss_type": {
        "vanilla ppo": "It is the loss of --algo ppo and grpo: leave it out.",
        "gspo cispo": "Type --algo {}.",
        "geo_mean": "Type --algo gmpo.",
        "sapo": "Type --algo.policy_loss SAPOLoss.",
        "gpg": "Type --algo.policy_loss ReinforceLoss.",
        "clip_cov kl_cov dppo_tv dppo_kl dro": _NO_LOSS,
    },
    "loss_type loss_agg_mode aggregation": {
        "dapo bnpo": _TOKENS,
        "grpo seq-mean-token-mean": "Type --algo.policy_loss.aggregation seq-mean-token-mean.",
        "dr_grpo": (
            "Type --algo.policy_loss.aggregation seq-mean-token-sum-norm --algo.policy_loss.horizon N, with "
            "the N of sampling.max_new_tokens."
        ),
        "gspo cispo simpo": "Type --algo {}.",
        "sapo": "Type --algo.policy_loss SAPOLoss.",
        "nll chunked_nll kto sft": (
            "It is the loss of --algo sft and kto: leave it out. A part of dpo's or simpo's is "
            "--algo.loss.sft_coef C."
        ),
        "sigmoid_norm": "Type --algo.loss.length_average true.",
        "apo_zero_unpaired": "Type --algo kto --algo.loss.baseline false.",
        (
            "dft luspo vespo exo_pair nca_pair bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop"
        ): _NO_LOSS,
    },
    "scale_rewards norm_adv_by_std_in_grpo scale": {
        "group true": "Type --algo.scale std.",
        "false": "Type --algo.scale none.",
        "batch": "There is no scale of the batch: --algo.scale has std, that of the group, and none.",
    },
    "is_correction_type vllm_is_correction_type mode": {
        "tis": "Type --algo.policy_loss.correction.mode truncate.",
        "icepop": "Type --algo.policy_loss.correction.mode mask.",
    },
    "dtype torch_dtype param_dtype model_dtype bf16": {
        "bf16 true": _BFLOAT16,
        "fp32 false": "Models compute in float32 unless --algo.actor.dtype is typed: leave it out.",
        "fp16 float16 half": "There is no such type here: --algo.actor.dtype has float32 and bfloat16.",
    },
    "lr_scheduler_type lr_scheduler warmup_style schedule": {
        "cosine_with_min_lr cosine_warmup_with_min_lr": _FALLING,
        "constant_with_warmup": "Type --algo.actor.optimizer.warmup_steps N, with the constant schedule.",
    },
    "actor.strategy critic.strategy ref.strategy engine": {
        "fsdp2": "Type --strategy.settings.engine fsdp.",
        "deepspeed": "Type --strategy.settings.engine zero.",
    },
    "rollout.name generator": {
        "hf": "Type --strategy.settings.generator native.",
        "sglang": "There is no SGLang: --strategy.settings.generator has native and vllm.",
    },
    "lora_target_modules target_modules": {
        "all-linear": "All linear layers have adapters unless it is typed: leave it out."
    },
    "logger report_to": {
        "wandb": _WANDB,
        "tensorboard": "Type --trainer.logger TensorBoardLogger --trainer.logger.save_dir DIRECTORY.",
        "mlflow": "Type --trainer.logger MLFlowLogger.",
        "none": "Type --trainer.logger false.",
        "console": "The console needs none: leave it out.",
    },
    "resume_mode resume_from_checkpoint load_checkpoint load_enable": {
        "disable false": "A run begins anew unless --ckpt_path is typed: leave it out."
    },
}
"""Names there and here, in a line -> values there, in a line -> what is said of the first that is found."""
VALUES = {name: values for names, values in _HERE.items() for name in names.split()}

_TYPED = (
    re.compile(r"unrecognized arguments: [+-]*([\w.-]+)[= ](\[.*?\]|\S+)"),
    re.compile(r"NestedArg\(key='([\w.]+)', val=(.*)\)"),
    re.compile(
        r"Parser key \"([\w.]+)\":(?:(?!Parser key).)*?(?:Given|Got) value: "
        r"((?!\[?(?:Nested|Namespace)).+?)$",
        re.MULTILINE | re.DOTALL,
    ),
)
"""Where an error of the parser has an option and its value."""


def value_elsewhere(message: str) -> str:
    """What a value that an error of the parser is about is here; empty for no known one."""
    typed = (pair for form in _TYPED for pair in form.findall(message))
    found = (_said(option.replace("-", "_"), value.lower()) for option, value in typed)
    return next(filter(None, found), "")


def _said(option: str, value: str) -> str:
    """What is said of a value of an option; empty where nothing is known."""
    at, name = next(((at, name) for at, name in names_within(option) if name in VALUES), (0, ""))
    words, known = re.findall(r"[\w-]+", value), VALUES.get(name, {}).items()
    found = (here.format(word) for there, here in known for word in words if word in there.split())
    return of_role(next(found, ""), option.split(".")[:at])
