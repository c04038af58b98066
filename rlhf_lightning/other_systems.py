"""What options of TRL, verl and OpenRLHF are called here; docs/coming_from.md has the same, in tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_ESTIMATOR = "The estimator is the algorithm's: --algo NAME."
_STEPS = (
    "An optimizer step takes --algo.mini_batch_size answers that were drawn. Of given answers it takes "
    "--data.batch_size rows, or pairs: leave mini_batch_size out."
)
_MICRO_BATCHES = (
    "Micro-batches are counted in tokens, --strategy.settings.train.max_tokens_per_micro_batch; a step has "
    f"as many as it needs. {_STEPS}"
)
_HELD_OUT = (
    "Held-out prompts are answered greedily. To draw N answers to each as well, type "
    "--trainer.callbacks+=SampledValidation --trainer.callbacks.samples N, and where they are not drawn as "
    "in training --trainer.callbacks.temperature T --trainer.callbacks.top_p P."
)
_GENERATED = "An iteration answers --data.batch_size prompts, each --algo.group_size times."
_BOTH_SIDES = (
    "Type --algo.policy_loss.clip_low N --algo.policy_loss.clip_high N: there one number limits both sides, "
    "here each has its own."
)
_BOTH_LENGTHS = (
    "It counts prompt and answer, here each has its limit: type --data.max_prompt_tokens N and, where "
    "answers are given, --data.max_response_tokens N; where they are drawn, sampling.max_new_tokens of the "
    "actor."
)
KL_STAYS = (
    "--algo.reward_kl_coef 0: the KL in the reward, which reinforcepp, rloo and remax have by default, would "
    "stay."
)
"""What a KL in the loss wants beside it to be the only one."""
_FOLLOWS = (
    "Type --algo.reference.decay D, which is 1 - ref_model_mixup_alpha, and --algo.reference.every N, which "
    "counts iterations."
)
_EQUAL_SCORES = "Type --algo dapo: it leaves out groups with equal scores."
_ONE_KL = f"Type --algo.policy_loss.kl_coef B and {KL_STAYS}"
_NOTHING = "There is nothing to set: leave it out."
_SHARING = "The strategy decides which models share devices: --strategy colocated, split or standalone."


def _trained(option: str) -> tuple[str, ...]:
    """An option of the model that is trained: the actor, or else the reward or cost model."""
    return (f"algo.actor.{option}", f"algo.reward.{option}", f"algo.cost.{option}")


_HERE: dict[str, tuple[str, ...] | str] = {
    "lr learning_rate actor_learning_rate": _trained("optimizer.lr"),
    "critic_learning_rate": ("algo.critic.optimizer.lr",),
    "lr_scheduler_type lr_scheduler warmup_style": _trained("optimizer.schedule"),
    "warmup_steps": _trained("optimizer.warmup_steps"),
    "lr_warmup_steps": (
        "Type --algo.actor.optimizer.warmup_steps N, which counts optimizer steps; verl counts iterations."
    ),
    "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio warmup_steps_ratio": (
        "Type --algo.actor.optimizer.warmup_ratio R, a share of optimizer.total_steps."
    ),
    "min_lr_ratio": _trained("optimizer.min_lr_ratio"),
    "lr_scheduler_kwargs": (
        "Type the schedule's options one by one: --algo.actor.optimizer.total_steps N "
        "--algo.actor.optimizer.min_lr_ratio R."
    ),
    "weight_decay l2": _trained("optimizer.weight_decay"),
    "adam_beta1 adam_beta2 adam_betas optim.betas adam.betas": (
        "Type --algo.actor.optimizer.betas '[B1, B2]'."
    ),
    "adam_epsilon": _trained("optimizer.eps"),
    "optim.total_training_steps": _trained("optimizer.total_steps"),
    "max_grad_norm max_norm grad_clip clip_grad": _trained("optimizer.grad_clip"),
    "optim": "Every model is trained with AdamW, with options such as --algo.actor.optimizer.lr.",
    "model model_name_or_path pretrain sft_model_path model.path partial_pretrain": _trained("path"),
    "ref_model": ("algo.reference.path",),
    "teacher_model_name_or_path teacher_model": ("algo.teacher.path",),
    "lmbda": "Type --algo.given G, which is 1 - lmbda: the share of iterations of given answers.",
    "topk_logits_k": ("algo.candidates",),
    "value_model critic_pretrain": ("algo.critic.path",),
    "reward_model_path reward_pretrain reward.model_name_or_path reward_model.model.path judge.path": (
        "algo.reward.path",
    ),
    "reward_funcs reward_weights remote_rm_url remote_url": ("algo.reward.functions",),
    "custom_reward_function.path custom_reward_function.name": (
        "Type --algo.reward.functions MODULE.NAME, a dotted path."
    ),
    "reward_manager": (
        "Functions score answers, --algo.reward.functions NAME; what the manager dapo takes from long ones "
        "is --algo.overlong.buffer N of --algo dapo."
    ),
    "missing_eos_penalty": ("algo.reward.truncated_penalty",),
    "stop_properly_penalty_coef": (
        "No score is scaled: --algo.reward.truncated_penalty P takes P from that of an answer that was cut "
        "off."
    ),
    "mask_truncated_completions": ("algo.mask_truncated",),
    "dtype torch_dtype param_dtype model_dtype bf16": _trained("dtype"),
    "gradient_checkpointing gradient_checkpointing_enable enable_gradient_checkpointing": (
        _trained("gradient_checkpointing")
    ),
    "trust_remote_code": "Models are of the classes that transformers has: leave it out.",
    "use_peft peft_config lora_r lora_rank ds.lora.rank": _trained("lora.rank"),
    "lora_alpha ds.lora.alpha": _trained("lora.alpha"),
    "lora_target_modules target_modules": _trained("lora.target_modules"),
    "lora_adapter_path": _trained("lora.path"),
    "max_completion_length max_response_length response_length max_new_tokens generate_max_len": (
        "data.max_response_tokens",
        "algo.actor.sampling.max_new_tokens",
    ),
    "temperature": ("algo.actor.sampling.temperature",),
    "top_p": ("algo.actor.sampling.top_p",),
    "top_k": ("algo.actor.sampling.top_k",),
    "min_p": ("algo.actor.sampling.min_p",),
    "stop_token_ids": ("algo.actor.sampling.stop_token_ids",),
    "stop_strings stop": ("algo.actor.sampling.stop_strings",),
    "generation_kwargs.*": "Type its options one by one, such as --algo.actor.sampling.min_p P.",
    "do_sample": "Answers are drawn: leave it out. Greedily is --algo.actor.sampling.temperature 0.",
    "ignore_eos": "An answer ends at the end token: leave it out.",
    (
        "repetition_penalty presence_penalty frequency_penalty logit_bias min_tokens min_new_tokens "
        "vllm_structured_outputs_regex"
    ): "There is no such option: it would change what log-probabilities are of.",
    (
        "val_kwargs.* eval.temperature eval.top_p eval.max_new_tokens eval.n_samples_per_prompt "
        "eval_temperature eval_n_samples_per_prompt num_generations_eval"
    ): _HELD_OUT,
    "num_generations n_samples_per_prompt rollout.n": ("algo.group_size",),
    "num_iterations num_ppo_epochs ppo_epochs": ("algo.epochs",),
    "ppo_mini_batch_size": (
        "Type --algo.mini_batch_size N, which counts answers: the prompts of verl times --algo.group_size."
    ),
    (
        "per_device_train_batch_size gradient_accumulation_steps micro_train_batch_size "
        "micro_batch_size micro_rollout_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu micro_batch_size_per_gpu"
    ): _MICRO_BATCHES,
    "num_mini_batches": (
        "Type --algo.mini_batch_size N, the answers of a step: those of an iteration / num_mini_batches."
    ),
    "generation_batch_size steps_per_generation gen_batch_size": _GENERATED,
    "adv_estimator advantage_estimator advantage.estimator": _ESTIMATOR,
    "loss_mode policy_loss_type": "The loss is the algorithm's: --algo grpo, gspo, cispo or gmpo.",
    "tau_pos sapo_temperature_pos": "It is policy_loss.tau_pos, where policy_loss is SAPOLoss.",
    "tau_neg sapo_temperature_neg": "It is policy_loss.tau_neg, where policy_loss is SAPOLoss.",
    "use_loss use_kl_loss": _ONE_KL,
    "beta": ("algo.policy_loss.kl_coef", "algo.reward_kl_coef", "algo.loss.beta"),
    "kl_loss_coef": ("algo.policy_loss.kl_coef",),
    "use_bias_correction_kl": ("algo.policy_loss.kl_weighted",),
    "kl_estimator": ("algo.policy_loss.kl_estimator", "algo.kl.estimator"),
    "kl_penalty": ("algo.kl.estimator",),
    "kl_target kl_ctrl.target_kl kl.target": ("algo.kl.target",),
    "kl_horizon kl_ctrl.horizon kl.horizon": ("algo.kl.horizon",),
    "kl_ctrl.type": "It is adaptive where --algo.kl.target is typed, else fixed: leave it out.",
    "kl_loss_type": ("algo.policy_loss.kl_estimator",),
    "algo.kl_coef": (),  # of no system, and the reward's or the loss's
    "init_kl_coef init_coef kl_coef use_kl_in_reward": ("algo.kl.coef", "algo.reward_kl_coef"),
    "eps_clip_low_high": "Type --algo.policy_loss.clip_low LOW --algo.policy_loss.clip_high HIGH.",
    "epsilon cliprange clip_ratio eps_clip": _BOTH_SIDES,
    "clip_ratio_low": ("algo.policy_loss.clip_low",),
    "epsilon_high clip_ratio_high": ("algo.policy_loss.clip_high",),
    "delta clip_ratio_c dual_clip": ("algo.policy_loss.dual_clip",),
    "critic.loss_agg_mode": "The critic's loss is a mean over tokens: leave it out.",
    "loss_type loss_agg_mode": ("algo.policy_loss.aggregation", "algo.loss.kind"),
    "loss_scale_factor": ("algo.policy_loss.horizon",),
    "ptx_coef": ("algo.ptx_loss.coef",),
    "entropy_coeff entropy_coef entropy_loss_coef": ("algo.policy_loss.entropy_coef",),
    "vf_coef": ("algo.value_loss.coef",),
    "lambd lam": ("algo.lam",),
    "gamma": ("algo.gamma",),
    "calculate_log_probs": ("algo.actor.recompute_log_probs",),
    "vllm_importance_sampling_clip_min": ("algo.policy_loss.correction.low",),
    "vllm_importance_sampling_mode": (
        "Type --algo.policy_loss.correction.level token or sequence, and --algo.policy_loss.correction.mode "
        "truncate or mask."
    ),
    (
        "is_correction_enable enable_vllm_is_correction vllm_importance_sampling_correction "
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max tis_imp_ratio_cap "
        "rollout_is_threshold rollout_correction.*"
    ): ("algo.policy_loss.correction.high",),
    "is_correction_threshold vllm_is_truncated_threshold": (
        "Type --algo.policy_loss.correction.low LOW --algo.policy_loss.correction.high HIGH."
    ),
    "is_correction_type vllm_is_correction_type": ("algo.policy_loss.correction.mode",),
    "importance_sampling_level": "The ratio is the algorithm's: --algo grpo (token), --algo gspo (sequence).",
    "environment_factory agent_func_path tools multi_turn.*": ("algo.actor.environment.function",),
    "reward.clip_range reward_clip_range": (
        "Type --algo.reward.clip HIGH, one number: scores stay within -HIGH and HIGH."
    ),
    "normalize_enable normalize_reward": ("algo.scaling.rewards",),
    (
        "filter_groups.* dynamic_filtering_enable dynamic_filtering dynamic_filtering_range "
        "dynamic_filtering_reward_range"
    ): _EQUAL_SCORES,
    "overlong_buffer.penalty_factor overlong_buffer_cfg.penalty_factor overlong_penalty_factor": (
        "algo.overlong.factor",
    ),
    "overlong_buffer.* overlong_buffer_cfg.* overlong_buffer_len": ("algo.overlong.buffer",),
    "sync_ref_model ref_model_mixup_alpha": _FOLLOWS,
    "ref_model_sync_steps": ("algo.reference.every",),
    "cliprange_value value_clip": ("algo.value_loss.clip",),
    "scale_rewards norm_adv_by_std_in_grpo": ("algo.scale",),
    "center_rewards_coefficient": ("algo.loss.centering",),
    "label_smoothing": ("algo.loss.label_smoothing",),
    "loss_weights rpo_alpha cpo_alpha nll_loss_coef": ("algo.loss.sft_coef",),
    "ipo ipo_enable": (  # OpenRLHF's, which sums
        "Type --algo.loss.kind ipo --algo.loss.length_average false: there log-ratios are summed over tokens."
    ),
    "margin_loss margin_loss_enable": "Type --algo.loss.margin true --data.margin_field margin.",
    "simpo_gamma": ("algo.loss.gamma",),
    "desirable_weight desirable_loss_weight": ("algo.loss.desirable_weight",),
    "undesirable_weight undesirable_loss_weight": ("algo.loss.undesirable_weight",),
    "assistant_only_loss multiturn.*": ("data.every_answer",),
    "completion_only_loss": "The answer is learned, never the prompt: leave it out.",
    "critic_warmup freezing_actor_steps freezing_steps": ("algo.critic_warmup_steps",),
    "dataset_name train_dataset train_files prompt_data prompt_dataset dataset": ("data.path",),
    "eval_dataset eval.dataset val_files": ("data.val_path",),
    "data.train_batch_size rollout_batch_size rollout.batch_size": ("data.batch_size",),
    "train_batch_size train.batch_size": _STEPS,
    "max_prompt_length prompt_max_len": ("data.max_prompt_tokens",),
    "max_length max_seq_length max_len": _BOTH_LENGTHS,
    "prompt_key input_key": ("data.prompt_field",),
    "input_template": ("data.prompt_template",),
    "chosen_key": ("data.chosen_field",),
    "rejected_key": ("data.rejected_field",),
    "data_seed": ("data.seed",),
    "shuffle_dataset": ("data.shuffle",),
    "dataloader_num_workers": ("data.num_workers",),
    "output_key response_key multiturn.messages_key": ("data.response_field",),
    "prompt_dict_keys response_dict_keys": (
        "Type both names with a dot between them, such as --data.prompt_field extra_info.question "
        "--data.response_field extra_info.answer."
    ),
    "label_key": ("data.answer_field",),
    "apply_chat_template": ("data.chat_template",),
    "chat_template_kwargs.* apply_chat_template_kwargs.*": ("data.chat_template_options",),
    "eos_token chat_template_path": (
        "The model's directory has the chat template, and with it the end of an answer: leave it out."
    ),
    "max_samples train_max_samples": ("data.limit",),
    "dataset_text_field": ("data.text_field",),
    "val_batch_size per_device_eval_batch_size": (
        "Held-out rows come in batches of --data.batch_size: leave it out."
    ),
    "truncation filter_overlong_prompts": (
        "Rows with more tokens than --data.max_prompt_tokens are dropped, and counted."
    ),
    "packing packing_strategy packing_samples eval_packing padding_free use_remove_padding": (
        "Nothing is padded: leave it out."
    ),
    (
        "use_dynamic_bsz use_dynamic_batch ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu "
        "dynamic_batch_enable max_tokens_per_gpu train_max_tokens_per_gpu"
    ): ("strategy.settings.train.max_tokens_per_micro_batch",),
    "num_train_epochs total_epochs num_episodes": ("trainer.max_epochs",),
    "train.max_epochs": (
        "Type --trainer.max_epochs, or, for passes over each batch of answers, --algo.epochs."
    ),
    "total_training_steps": ("trainer.max_steps",),
    "output_dir save_path default_local_dir ckpt.path": ("trainer.default_root_dir",),
    "report_to": "Type --trainer.logger CLASS, or false for none.",
    "project_name wandb.project wandb_project use_wandb": (
        "Type --trainer.logger WandbLogger --trainer.logger.project NAME."
    ),
    "experiment_name run_name wandb_run_name": (
        "Type --trainer.logger WandbLogger --trainer.logger.name NAME; --trainer.logger.project is another."
    ),
    "logging_steps": ("trainer.log_every_n_steps",),
    "eval_steps eval.steps eval_strategy test_freq": (
        "Type --trainer.val_check_interval N --trainer.check_val_every_n_epoch null, with N iterations."
    ),
    "save_steps save_strategy save_freq": (
        "Type --trainer.callbacks+=LastCheckpoint --trainer.callbacks.directory DIRECTORY "
        "--trainer.callbacks.every_n_steps N, with N iterations."
    ),
    "max_actor_ckpt_to_keep save_total_limit ckpt.max_num max_ckpt_num": (
        "A run keeps its newest checkpoint: leave it out."
    ),
    "val_only": "Type rlhf validate instead of rlhf fit.",
    "val_before_train eval_on_start": "Type --trainer.callbacks+=ValidateFirst.",
    "log_completions rollout_data_dir": "Type --trainer.callbacks+=Rollouts.",
    "log_val_generations": "Type --trainer.callbacks+=SampleTable --trainer.callbacks.rows N.",
    "tensorboard_dir use_tensorboard": (
        "Type --trainer.logger TensorBoardLogger --trainer.logger.save_dir DIRECTORY."
    ),
    "save_hf save_hf_ckpt": "rlhf export CHECKPOINT OUT writes a Hugging Face directory: leave it out.",
    "seed": ("seed_everything",),
    "resume resume_mode resume_from_path resume_from_checkpoint load_checkpoint load_enable": (
        "Type --ckpt_path last, or the path of a checkpoint."
    ),
    "gpus num_gpus num_processes": ("strategy.devices",),
    (
        "n_gpus_per_node num_gpus_per_node actor_num_gpus_per_node critic_num_gpus_per_node "
        "ref_num_gpus_per_node reward_num_gpus_per_node"
    ): "Type --strategy.devices N, the GPUs of all nodes together, or leave it out to take them all.",
    "nnodes num_nodes": (
        "The nodes are those of the Ray cluster: --strategy.address HOST:PORT, or leave it out."
    ),
    "num_engines vllm_num_engines": (
        "Type --strategy openrlhf --strategy.generator_devices N, for devices that only generate. With "
        "--strategy colocated all of them do: leave it out."
    ),
    "async_train train.async_enable": "Type --strategy one-step-off.",
    "actor.strategy critic.strategy ref.strategy": ("strategy.settings.engine",),
    "use_vllm rollout.name": "Type --strategy.settings.generator vllm, or native.",
    "gpu_memory_utilization vllm_gpu_memory_utilization": ("strategy.settings.vllm.gpu_memory_utilization",),
    "max_num_seqs": ("strategy.settings.vllm.max_num_seqs",),
    "max_num_batched_tokens": ("strategy.settings.vllm.max_num_batched_tokens",),
    "max_model_len vllm_max_model_length": ("strategy.settings.vllm.max_model_len",),
    "enforce_eager": ("strategy.settings.vllm.enforce_eager",),
    "enable_prefix_caching": ("strategy.settings.vllm.enable_prefix_caching",),
    "free_cache_engine enable_sleep vllm_enable_sleep vllm_enable_sleep_mode enable_sleep_mode": (
        "strategy.settings.vllm.sleep",
    ),
    (
        "sync_backend vllm_sync_backend vllm_sync_with_ray vllm_model_impl vllm_server_host "
        "vllm_server_base_url vllm_server_port vllm_server_timeout vllm_group_port load_format "
        "layered_summon rollout.mode enable_chunked_prefill disable_log_stats"
    ): "vLLM computes within the devices' processes, and weights go there by themselves: leave it out.",
    "zero_stage": ("strategy.settings.zero.stage",),
    "deepspeed": "Type --strategy.settings.engine zero --strategy.settings.zero.stage N.",
    "param_offload optimizer_offload deepspeed_enable_sleep ds.enable_sleep": ("strategy.offload",),
    "adam_offload": ("strategy.settings.zero.offload_optimizer",),
    "colocate_all colocate_all_models vllm_mode": _SHARING,
    "rollout.tensor_model_parallel_size vllm_tensor_parallel_size tensor_parallel_size": (
        "With --strategy hybrid3d type --strategy.parallel.generate.t N. With FSDP and ZeRO a device "
        "generates with a whole model: leave it out."
    ),
    "ulysses_sequence_parallel_size ring_attn_size ring_attn_head_stride context_parallel_size": (
        "Sequences are not divided: leave it out."
    ),
    "disable_dropout": "There is no dropout: leave it out.",
    "router_aux_loss_coef aux_loss_coef": "No loss balances experts here: leave it out.",
    (
        "reward_model.num_workers reward_model.micro_batch_size_per_gpu reward_model.rollout.name "
        "reward_model.rollout.prompt_length reward_model.rollout.response_length "
        "reward_model.rollout.gpu_memory_utilization reward_model.rollout.tensor_model_parallel_size"
    ): "A reward model computes as the others do: leave it out.",
    "load_in_4bit load_in_8bit": "There is no such option: weights are not quantised.",
    "reward_model.enable": "A reward model is there where --algo.reward.path names one: leave it out.",
    (
        "hybrid_engine attn_implementation use_fused_kernels balance_batch log_prob_use_dynamic_bsz "
        "return_raw_chat use_reward_loop dataset_num_proc filter_overlong_prompts_workers "
        "precompute_ref_log_probs balance_dp_token average_tokens_across_devices"
    ): _NOTHING,
    "tensor_model_parallel_size": ("strategy.parallel.t",),
    "pipeline_model_parallel_size": ("strategy.parallel.p",),
}
"""Names there, in a line -> options here, of which a class has the first or the next, but rather one that it
uses; or a sentence.

A name with `.*` is that of a group, and stands for the options below it, too.
"""
OTHERS = {name: here for names, here in _HERE.items() for name in names.split()}
_ROLES = {"critic": "critic", "ref": "reference"}
"""Models beside the actor whose options have its names, behind these words, and what they are here."""


def known_elsewhere(option: str, owner: object = None) -> tuple[str, ...] | str:
    """What an option of TRL, verl or OpenRLHF is here: options, or a sentence; empty for no known name.

    Args:
        option: with or without the parts that stand before its name there, such as `actor.optim.lr`. Those
            that name another model make it an option of that one.
        owner: the class that may have it: an option that is on there by default goes first.
    """
    start, found = next(((at, name) for at, name in names_within(option) if name in OTHERS), (0, ""))
    if not found:
        return ()
    here, before = OTHERS[found], option.split(".")[:start]
    if isinstance(here, str):
        return of_role(here, before)
    theirs = tuple(of_role(path, before) for path in here if path.startswith("algo.actor."))
    if theirs and _ROLES.keys() & {*before}:
        return theirs
    return tuple(sorted(here, key=lambda path: not getattr(owner, path.partition(".")[2], None)))


def names_within(option: str) -> Iterator[tuple[int, str]]:
    """The names that an option may be known by: how many parts stand before each, and the name."""
    words = option.split(".")
    return ((at, name) for at in range(len(words)) for name in (".".join(words[at:]), f"{words[at]}.*"))


def of_role(here: str, before: Sequence[str]) -> str:
    """An option of the actor, or a sentence with some, for the model that the parts before a name tell."""
    role = next((_ROLES[word] for word in before if word in _ROLES), "actor")
    return here.replace("algo.actor.", f"algo.{role}.")
