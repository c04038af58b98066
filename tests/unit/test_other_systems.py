"""What an option of another system is here, for the algorithm that was chosen and the model that it is of."""

from __future__ import annotations

import re

import pytest
from lightning.pytorch import Trainer

import rlhf_lightning.strategies  # noqa: F401 - among which names are looked for; ray writes to the environment
from rlhf_lightning.algos import (
    DAPO,
    DPO,
    GRPO,
    KTO,
    PPO,
    RLOO,
    SFT,
    CostModel,
    Distillation,
    OnlineDPO,
    ReinforcePP,
    RewardModel,
    SimPO,
)
from rlhf_lightning.data import PreferenceData, PromptData
from rlhf_lightning.names import FOLDERS, choices
from rlhf_lightning.options import option_paths
from rlhf_lightning.other_systems import _HERE, OTHERS, known_elsewhere
from rlhf_lightning.other_values import VALUES
from rlhf_lightning.usage import option_error

ACTORS = "algo.actor.sampling.max_new_tokens"
GREEDY = "Held-out prompts are answered greedily. To draw N answers to each as well, type --trainer."


def test_a_name_has_one_answer() -> None:
    """Of two lines with one name the first would never be read."""
    assert sum(len(names.split()) for names in _HERE) == len(OTHERS)


def told(option: str, algo: type) -> str:
    """What is said of an option without its prefix, beside an algorithm."""
    typed = f"unrecognized arguments: --{option} 1"
    return option_error(typed, {"trainer": Trainer, "algo": algo}).removeprefix(f"{typed}. ")


def test_a_seed_is_that_of_the_run() -> None:
    said = option_error("unrecognized arguments: --seed 7", {"data": PromptData})
    assert said.endswith("Did you mean --seed_everything?")


@pytest.mark.parametrize(
    ("option", "here"),
    [
        ("critic.model.enable_gradient_checkpointing", "gradient_checkpointing"),
        ("critic.optim.lr", "optimizer.lr"),
        ("critic.grad_clip", "optimizer.grad_clip"),
        ("critic.model.path", "path"),
        ("critic.model_name_or_path", "path"),
        ("critic.model.lora_rank", "lora.rank"),
    ],
)
def test_an_option_of_the_critic_stays_one(option: str, here: str) -> None:
    assert known_elsewhere(option) == (f"algo.critic.{here}",)
    assert told(option, PPO) == f"Did you mean --algo.critic.{here}?"


@pytest.mark.parametrize(
    ("typed", "here"),
    [
        ("trainer.logger=['console','wandb']", "Type --trainer.logger WandbLogger --trainer.logger.project"),
        ("trainer.val_before_train=False", "It is off here: leave it out."),
        ("--log_completions false", "It is off here: leave it out."),
        ("--log_completions true", "Type --trainer.callbacks+=Rollouts."),
        ("filter_groups.enable=True a.b=False", "Type --algo dapo: it leaves out groups with equal scores."),
        ("actor.use_kl_loss=False", "Type --algo.policy_loss.kl_coef 0."),
        ("--algo.use_kl_loss=True", "Type --algo.policy_loss.kl_coef N, which"),
        (
            "actor.use_kl_loss=True",
            "Type --algo.policy_loss.kl_coef N, which is also what turns it on, and --algo.reward_kl_coef 0:",
        ),
        ("algorithm.use_kl_in_reward=False", "Type --algo.reward_kl_coef 0, of PPO --algo.kl.coef 0."),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "Type --algo reinforcepp --algo.group_size"),
        ("actor.kl_loss_type=low_var_kl", "Type --algo.policy_loss.kl_estimator k3."),
        ("--loss_type dr_grpo", "Type --algo.policy_loss.aggregation seq-mean-token-sum-norm --algo.policy_"),
        ("--loss_type sigmoid_norm", "Type --algo.loss.length_average true."),
        ("--loss_type apo_zero_unpaired", "Type --algo kto --algo.loss.baseline false."),
        ("--loss_type simpo", "Type --algo simpo."),
        ("--loss_type sapo", "Type --algo.policy_loss SAPOLoss."),
        ("actor.policy_loss.loss_mode=sapo", "Type --algo.policy_loss SAPOLoss."),
        ("policy_loss.loss_mode=clip_cov", "There is no such loss here; docs/own_losses.md"),
        ("--loss_type nll", "It is the loss of --algo sft and kto: leave it out."),
        ("--loss_type exo_pair", "There is no such loss here; docs/own_losses.md says how to write one."),
        ("--loss-type=bnpo", "Type --algo.policy_loss.aggregation token-mean."),
        ("--scale_rewards False", "Type --algo.scale none."),
        ("--bf16 true", "Type --algo.actor.dtype bfloat16."),
        ("critic.lr_scheduler=cosine_with_min_lr", "Type --algo.critic.optimizer.schedule cosine --algo.cri"),
        ("actor.strategy=fsdp2", "Type --strategy.settings.engine fsdp."),
        ("--is_correction_type icepop", "Type --algo.policy_loss.correction.mode mask."),
        ("--router_aux_loss_coef 0.001", "No loss balances experts here: leave it out."),
        ("reward_model.enable=True", "A reward model is there where --algo.reward.path names one: leave it"),
        ("trainer.log_val_generations=9", "Type --trainer.callbacks+=SampleTable --trainer.callbacks.rows"),
        ("--lora_target_modules all-linear", "All linear layers have adapters unless it is typed: leave it "),
    ],
)
def test_a_value_of_another_system_is_answered_too(typed: str, here: str) -> None:
    dashes = "" if typed.startswith("--") else "Options begin with two dashes. "
    said = option_error(f"unrecognized arguments: {typed}", {"trainer": Trainer, "algo": PPO})
    assert said.startswith(f"unrecognized arguments: {typed}. {dashes}{here}")


def test_a_value_of_another_system_behind_an_option_of_ours_is_answered() -> None:
    tried = "Expected a dot import path string: console\n    - Expected a <class 'bool'>\n"
    for refused in (tried, f"Not a valid subclass of Logger\n    - {tried}"):
        given = f"  Errors:\n    - {refused}  Given value: ['console', 'wandb']"
        said = option_error(f'Parser key "trainer.logger":\n{given}', {})
        told = "is not a class. Type --trainer.logger WandbLogger --"
        assert said.startswith(f"trainer.logger: 'console' {told}")
        said = option_error(f'Parser key "trainer.logger":\n{given}'.replace("wandb", "x"), {})
        assert said == "trainer.logger: 'console' is not a class. The console needs none: leave it out."
        said = option_error(f'Parser key "trainer.logger":\n{given}'.replace("console", "swanlab"), {})
        assert said.startswith(f"trainer.logger: 'swanlab' {told}")
    lacks = "the following arguments are required: save_dir"
    given = f"  Errors:\n    - {lacks}\n  Given value: [Namespace(init_args=Namespace(version=None))]"
    assert option_error(f'Parser key "trainer.logger":\n{given}', {}) == f"trainer.logger: {lacks}"
    key = "NestedArg(key='actor.dtype', val='bf16')"
    said = option_error(f"Expected a typing.Literal['float32', 'bfloat16']\nGiven value: {key}", {})
    assert said.endswith(" Type --algo.actor.dtype bfloat16.")
    within = "Problem with given class_path 'rlhf_lightning.spec.LoRA':\n  Parser key \"target_modules\":\n"
    said = option_error(f"{within}    Expected a <class 'tuple'>. Got value: all-linear", {})
    assert "target_modules: all-linear is not a list. All linear layers have adapters unless it is" in said


def test_what_values_are_here_are_options() -> None:
    owners = [(kind, cls) for kind in FOLDERS for cls in choices(kind).values()]
    known = {f"{kind}.{path}" for kind, cls in owners for path in option_paths(cls)}
    said = " ".join(here for values in VALUES.values() for here in values.values())
    assert set(re.findall(r"--((?:algo|data|strategy)\.[\w.]+\w)", said)) <= known
    assert set(re.findall(r"--algo (\w+)", said)) <= choices("algo").keys()


def test_an_option_of_another_model_stays_one() -> None:
    assert told("critic.optim.lr_warmup_steps_ratio", PPO).startswith("Type --algo.critic.optimizer.warmup_r")
    assert told("critic.ppo_epochs", PPO) == "Did you mean --algo.epochs?"
    assert told("critic.loss_agg_mode", PPO) == "The critic's loss is a mean over tokens: leave it out."
    assert told("actor_rollout_ref.ref.model.path", GRPO) == "Did you mean --algo.reference.path?"
    assert told("actor_rollout_ref.actor.optim.lr", GRPO) == "Did you mean --algo.actor.optimizer.lr?"
    assert told("reference.dtype", GRPO) == "Did you mean --algo.reference.dtype?"


@pytest.mark.parametrize(
    "option",
    [
        "actor_rollout_ref.rollout.val_kwargs.temperature",
        "actor_rollout_ref.rollout.val_kwargs.n",
        "eval.n_samples_per_prompt",
        "eval_n_samples_per_prompt",
    ],
)
def test_how_validation_draws_is_not_how_training_does(option: str) -> None:
    assert told(option, GRPO).startswith(GREEDY)


@pytest.mark.parametrize(
    ("option", "algo", "here"),
    [
        ("beta", DPO, "loss.beta"),
        ("beta", KTO, "loss.beta"),
        ("beta", SimPO, "loss.beta"),
        ("beta", OnlineDPO, "loss.beta"),
        ("teacher_model_name_or_path", Distillation, "teacher.path"),
        ("topk_logits_k", Distillation, "candidates"),
        ("beta", GRPO, "policy_loss.kl_coef"),
        ("beta", PPO, "policy_loss.kl_coef"),
        ("beta", RLOO, "reward_kl_coef"),
        ("loss_type", DPO, "loss.kind"),
        ("loss_type", GRPO, "policy_loss.aggregation"),
        ("learning_rate", SFT, "actor.optimizer.lr"),
        ("learning_rate", PPO, "actor.optimizer.lr"),
        ("learning_rate", RewardModel, "reward.optimizer.lr"),
        ("learning_rate", CostModel, "cost.optimizer.lr"),
        ("init_kl_coef", PPO, "kl.coef"),
        ("init_kl_coef", GRPO, "reward_kl_coef"),
    ],
)
def test_the_algorithm_that_was_chosen_decides(option: str, algo: type, here: str) -> None:
    assert told(option, algo) == f"Did you mean --algo.{here}?"


def test_what_one_option_there_is_two_here_or_another_value_is_said() -> None:
    for option in ("actor_rollout_ref.actor.use_kl_loss", "use_kl_loss", "algo.kl.use_loss"):
        said = told(option, ReinforcePP)
        assert said.startswith("Type --algo.policy_loss.kl_coef B and --algo.reward_kl_coef 0: the KL in the")
    assert told("reward.clip_range", GRPO).startswith("Type --algo.reward.clip HIGH, one number: scores")
    assert told("model.ipo_enable", DPO).startswith(
        "Type --algo.loss.kind ipo --algo.loss.length_average false: there log-ratios are summed"
    )
    said = told("model.margin_loss_enable", RewardModel)
    assert said == "Type --algo.loss.margin true --data.margin_field margin."
    assert told("is_correction_threshold", GRPO) == (
        "Type --algo.policy_loss.correction.low LOW --algo.policy_loss.correction.high HIGH."
    )
    assert told("reward.stop_properly_penalty_coef", PPO).startswith("No score is scaled: --algo.reward.")
    assert told("algo.dynamic_filtering_range", GRPO).startswith("Type --algo dapo: it leaves out groups")


@pytest.mark.parametrize(
    "option",
    [
        *("actor.ulysses_sequence_parallel_size", "actor_rollout_ref.hybrid_engine", "data.return_raw_chat"),
        *("disable_dropout", "data.val_batch_size", "reward_model.rollout.prompt_length"),
    ],
)
def test_what_needs_no_option_is_left_out(option: str) -> None:
    assert told(option, GRPO).endswith(": leave it out.")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("actor_rollout_ref.rollout.free_cache_engine", "Did you mean --strategy.settings.vllm.sleep?"),
        ("vllm.enable_sleep", "Did you mean --strategy.settings.vllm.sleep?"),
        ("ds.enable_sleep", "Did you mean --strategy.offload?"),
        ("vllm.sync_backend", "vLLM computes within the devices' processes, and weights go there by"),
        ("actor_rollout_ref.rollout.mode", "vLLM computes within the devices' processes, and weights go"),
        ("actor_rollout_ref.rollout.do_sample", "Answers are drawn: leave it out."),
        ("actor_rollout_ref.rollout.ignore_eos", "An answer ends at the end token: leave it out."),
        ("min_new_tokens", "There is no such option: it would change what log-probabilities are of."),
        ("vllm.tensor_parallel_size", "With --strategy hybrid3d type --strategy.parallel.generate.t N."),
        ("strategy.settings.vllm.tensor_parallel_size", "With --strategy hybrid3d type --strategy.parallel."),
    ],
)
def test_options_of_what_generates_are_answered(option: str, said: str) -> None:
    assert told(option, GRPO).startswith(said)


def test_whoever_learns_every_answer_of_a_conversation_is_told_how() -> None:
    for option in ("assistant_only_loss", "multiturn"):
        assert told(option, SFT) == "Did you mean --data.every_answer?"
    assert told("completion_only_loss", SFT) == "The answer is learned, never the prompt: leave it out."


class Tempered(GRPO):
    """Has an option by a name that another system has, too."""

    beta: float = 0.1


def test_the_kl_that_an_algorithm_has_is_the_one_that_is_meant() -> None:
    """TRL's RLOO has it in the reward; in the loss it would come on top of the one that is there."""
    within = (
        "Problem with given class_path 'rlhf_lightning.algos.{}':\n    unrecognized arguments: --beta=0.1"
    )
    assert option_error(within.format("RLOO"), {}).endswith("Did you mean reward_kl_coef?")
    assert option_error(within.format("GRPO"), {}).endswith("Did you mean policy_loss.kl_coef?")


def test_an_option_of_ones_own_goes_first() -> None:
    assert told("beta", Tempered) == "Did you mean --algo.beta?"


def test_an_option_that_the_algorithm_lacks_is_told_of_those_that_have_it() -> None:
    kl, _, loss = told("beta", SFT).split(" more. ")
    assert kl.startswith("--algo.policy_loss.kl_coef is an option of --algo cispo, ")
    assert loss == "--algo.loss.beta is an option of --algo dpo, kto, distillation, onlinedpo and 1 more."
    assert told("critic.optim.lr", GRPO) == "--algo.critic.optimizer.lr is an option of --algo ppo, saferlhf."


def test_what_is_counted_is_said() -> None:
    assert told("ppo_mini_batch_size", GRPO) == (
        "Type --algo.mini_batch_size N, which counts answers: the prompts of verl times --algo.group_size."
    )
    for answers in ("train_batch_size", "train.batch_size", "per_device_train_batch_size"):
        assert "Of given answers it takes --data.batch_size rows, or pairs: leave mini_" in told(answers, DPO)
    for prompts in ("data.train_batch_size", "rollout_batch_size", "rollout.batch_size"):
        assert told(prompts, GRPO) == "Did you mean --data.batch_size?"
    within = "Problem with given class_path 'rlhf_lightning.data.PromptData':\n"
    said = option_error(f"{within}    unrecognized arguments: --train_batch_size=1", {})
    assert said.endswith("Did you mean batch_size?")  # typed as --data.train_batch_size, which is verl's

    share = "optimizer.warmup_ratio R, a share of optimizer.total_steps."
    assert told("warmup_ratio", SFT) == f"Type --algo.actor.{share}"
    assert told("warmup_ratio", RewardModel) == f"Type --algo.reward.{share}"
    assert told("lr_warmup_ratio", CostModel) == f"Type --algo.cost.{share}"
    for option, kind in (("warmup_ratio", RewardModel), ("critic.optimizer.lr_warmup_ratio", PPO)):
        within = f"Problem with given class_path 'rlhf_lightning.algos.{kind.__name__}':\n"
        said = option_error(f"{within}    unrecognized arguments: --{option}=0.1", {})
        assert said.endswith(f"Type {'--algo.reward.' * (kind is RewardModel)}{share}")
    assert told("critic.optim.lr_warmup_steps", PPO) == (
        "Type --algo.critic.optimizer.warmup_steps N, which counts optimizer steps; verl counts iterations."
    )
    assert told("warmup_steps", PPO) == "Did you mean --algo.actor.optimizer.warmup_steps?"


def test_a_limit_of_both_sides_stays_one() -> None:
    """With the lower side alone the upper one would keep its default: another algorithm."""
    for option in ("epsilon", "cliprange", "actor.clip_ratio", "eps_clip"):
        assert told(option, GRPO) == (
            "Type --algo.policy_loss.clip_low N --algo.policy_loss.clip_high N: there one number limits both "
            "sides, here each has its own."
        )
    for option, here in (("sapo_temperature_pos", "tau_pos"), ("actor.tau_neg", "tau_neg")):
        assert told(option, GRPO) == f"It is policy_loss.{here}, where policy_loss is SAPOLoss."
    assert told("clip_ratio_low", GRPO) == "Did you mean --algo.policy_loss.clip_low?"
    assert told("epsilon_high", GRPO) == "Did you mean --algo.policy_loss.clip_high?"


def test_a_limit_of_prompt_and_answer_is_two() -> None:
    """With the prompt's alone, rows with longer answers would still be dropped."""
    for option, algo in (("max_length", SFT), ("max_length", RewardModel), ("data.max_len", GRPO)):
        assert told(option, algo) == (
            "It counts prompt and answer, here each has its limit: type --data.max_prompt_tokens N and, "
            "where answers are given, --data.max_response_tokens N; where they are drawn, "
            "sampling.max_new_tokens of the actor."
        )
    assert told("max_prompt_length", GRPO) == "Did you mean --data.max_prompt_tokens?"


@pytest.mark.parametrize(
    ("option", "algo", "here"),
    [
        ("kl_ctrl.target_kl", PPO, "algo.kl.target"),
        ("algorithm.kl_penalty", PPO, "algo.kl.estimator"),
        ("actor.optim.total_training_steps", PPO, "algo.actor.optimizer.total_steps"),
        ("critic.optim.clip_grad", PPO, "algo.critic.optimizer.grad_clip"),
        ("entropy_coef", GRPO, "algo.policy_loss.entropy_coef"),
        ("use_bias_correction_kl", GRPO, "algo.policy_loss.kl_weighted"),
        ("loss_scale_factor", GRPO, "algo.policy_loss.horizon"),
        ("ptx_coef", PPO, "algo.ptx_loss.coef"),
        ("rpo_alpha", DPO, "algo.loss.sft_coef"),
        ("simpo_gamma", SimPO, "algo.loss.gamma"),
        ("freezing_actor_steps", PPO, "algo.critic_warmup_steps"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len", DAPO, "algo.overlong.buffer"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", DAPO, "algo.overlong.factor"),
        ("rollout.max_num_seqs", GRPO, "strategy.settings.vllm.max_num_seqs"),
        ("tis_imp_ratio_cap", GRPO, "algo.policy_loss.correction.high"),
        ("ckpt.path", GRPO, "trainer.default_root_dir"),
        ("data.train_max_samples", GRPO, "data.limit"),
        ("dataset_text_field", SFT, "data.text_field"),
        ("algo.advantage.is_correction_type", GRPO, "algo.policy_loss.correction.mode"),
    ],
)
def test_names_of_other_versions_and_of_single_parts(option: str, algo: type, here: str) -> None:
    assert told(option, algo) == f"Did you mean --{here}?"


def test_a_name_that_is_hardly_alike_is_not_taken_for_an_option() -> None:
    for option in ("dataset_config", "pretrain_mode", "storage_strategy", "algorithm.foo", "data_seeds"):
        assert told(option, GRPO) == "Try --help."
    within = "Problem with given class_path 'rlhf_lightning.algos.ReinforcePP':\n"
    said = option_error(f"{within}    unrecognized arguments: --kl.horizon=9", {})
    assert said.endswith("kl is an option of --algo ppo, saferlhf.")
    for option in ("eval_strategy", "save_strategy", "packing_strategy"):
        assert not told(option, GRPO).startswith("Did you mean")


def test_the_length_of_answers_is_that_of_the_data_where_it_has_them() -> None:
    typed = "unrecognized arguments: --max_completion_length 9"
    for data, here in ((PreferenceData, "data.max_response_tokens"), (PromptData, ACTORS)):
        assert option_error(typed, {"algo": DPO, "data": data}) == f"{typed}. Did you mean --{here}?"


def test_how_many_devices_generate_together() -> None:
    for option in ("actor_rollout_ref.rollout.tensor_model_parallel_size", "vllm_tensor_parallel_size"):
        assert told(option, GRPO).endswith("a device generates with a whole model: leave it out.")


def test_where_the_optimizer_lies() -> None:
    assert told("ds.adam_offload", PPO) == "Did you mean --strategy.settings.zero.offload_optimizer?"
    assert told("fsdp_config.optimizer_offload", PPO) == "Did you mean --strategy.offload?"


def test_a_part_lists_what_it_has() -> None:
    """Its option would be refused again with the prefix that lacks."""
    said = "Its options begin with --algo.actor. Actor has: path, dtype, "
    assert told("actor.foo", GRPO).startswith(said)
    assert f"--actor.foo 1. {said}" in option_error("unrecognized arguments: --actor.foo 1", {})


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("algo.group_size=4", "Type --algo.group_size=4."),
        ("algo=ppo", "Type --algo=ppo."),
        ("trainer.logger.project=x", "Type --trainer.logger.project=x."),
        ("trainer.devices=4", "The strategy divides them."),
        ("devices=4", "The strategy divides them."),
        ("strategy=split", "Type --strategy=split."),
        ("data.foo=4", "No class has it; rlhf fit --data.help NAME lists the options of one."),
        ("trainer.val_before_train=True", "Type --trainer.callbacks+=ValidateFirst."),
        ("reward_model.overlong_buffer.enable=True", "Did you mean --algo.overlong.buffer?"),
        ("data.apply_chat_template_kwargs.x=True", "Did you mean --data.chat_template_options?"),
    ],
)
def test_a_word_with_a_value_is_answered_with_an_option_that_is_there(typed: str, said: str) -> None:
    decided = {"trainer.devices": "The strategy divides them.", "trainer.strategy": "Type --strategy."}
    found = option_error(f"unrecognized arguments: {typed}", {"trainer": Trainer}, elsewhere=decided)
    assert found == f"unrecognized arguments: {typed}. Options begin with two dashes. {said}"
