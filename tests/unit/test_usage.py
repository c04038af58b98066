"""What an unknown option was meant for."""

from __future__ import annotations

import re

import pytest
from lightning.pytorch import Trainer

import rlhf_lightning.callbacks  # noqa: F401 - among which names are looked for; ray writes to the environment
from rlhf_lightning.algos import GRPO, SFT
from rlhf_lightning.names import FOLDERS, choices, class_path
from rlhf_lightning.options import option_paths
from rlhf_lightning.other_systems import OTHERS
from rlhf_lightning.usage import option_error


def answer(cls: str, option: str) -> str:
    """What is said of an option that a class lacks."""
    said = f"Problem with given class_path 'rlhf_lightning.{cls}':\n    unrecognized arguments: --{option}=1"
    return option_error(said, {}).partition("=1. ")[2]


@pytest.mark.parametrize(
    ("cls", "option", "expected"),
    [
        ("workers.Actor", "lr", "Did you mean optimizer.lr?"),
        ("workers.Reward", "model", "Did you mean path?"),
        ("functional.PolicyLoss", "beta", "Did you mean kl_coef?"),
        ("algos.PPO", "optimizer.lr", "Did you mean actor.optimizer.lr?"),
        ("algos.PPO", "reward_kl_coef", "Did you mean kl.coef?"),
        ("algos.PPO", "kl_coef", "Did you mean kl.coef or policy_loss.kl_coef?"),
        ("algos.PPO", "kl.coeff", "Did you mean coef?"),
        ("algos.GRPO", "kl.coef", "Did you mean reward_kl_coef?"),
        ("algos.GRPO", "kl_coef", "Did you mean reward_kl_coef or policy_loss.kl_coef?"),
        ("algos.GRPO", "kl_loss_coef", "Did you mean policy_loss.kl_coef?"),
        ("algos.GRPO", "critic.path", "critic is an option of --algo ppo, saferlhf."),
        ("algos.GRPO", "critic.optimizer.lr", "critic is an option of --algo ppo, saferlhf."),
        ("algos.PPO", "cost.functions", "cost is an option of --algo costmodel, saferlhf."),
        ("algos.RewardModel", "actor.path", "Did you mean reward.path?"),
        ("algos.PPO", "group_size", "group_size is an option of --algo cispo, dapo, gmpo, grpo and 5 more."),
        ("data.TaskData", "path", "path is an option of --data completiondata, "),
        ("workers.Actor", "optimizer.momentum", "OptimizerSpec has: lr, betas, "),
        ("algos.GRPO", "reward_model", "Did you mean reward.path?"),
        ("algos.GRPO", "reward_model.path", "Did you mean reward.path?"),
        ("algos.GRPO", "judge.path", "Did you mean reward.path?"),
        ("algos.GRPO", "value_model", "critic is an option of --algo ppo, saferlhf."),
        ("data.TaskData", "train_files", "path is an option of --data completiondata, "),
        ("algos.GRPO", "num_generations", "Did you mean group_size?"),
        ("algos.GRPO", "beta", "Did you mean policy_loss.kl_coef?"),
        ("algos.GRPO", "epsilon_high", "Did you mean policy_loss.clip_high?"),
        ("algos.GRPO", "scale_rewards", "Did you mean scale?"),
        ("algos.GRPO", "loss_type", "Did you mean policy_loss.aggregation?"),
        ("algos.GRPO", "reward_weights", "Did you mean reward.functions?"),
        ("algos.DPO", "loss_type", "Did you mean loss.kind?"),
        ("algos.DPO", "beta", "Did you mean loss.beta?"),
        ("algos.RewardModel", "learning_rate", "Did you mean reward.optimizer.lr?"),
        ("algos.RewardModel", "model", "Did you mean reward.path?"),
        ("algos.PPO", "vf_coef", "Did you mean value_loss.coef?"),
        ("algos.PPO", "missing_eos_penalty", "Did you mean reward.truncated_penalty?"),
        ("algos.PPO", "dataset_name", "Did you mean --data.path?"),
        ("algos.GRPO", "lora_r", "Did you mean actor.lora.rank?"),
        ("algos.GRPO", "gradient_accumulation_steps", "Micro-batches are counted in tokens, --strategy."),
        ("algos.DAPO", "buffer", "Did you mean overlong.buffer?"),
        ("workers.Actor", "optim.lr", "Did you mean optimizer.lr?"),
        ("workers.Actor", "rollout.n", "Did you mean --algo.group_size?"),
        ("data.PromptData", "label_key", "Did you mean answer_field?"),
        ("data.PromptData", "max_response_length", "Did you mean --algo.actor.sampling.max_new_tokens?"),
        ("algos.PPO", "wholly.unknown", "PPO has: actor, critic, "),
        ("strategies.HybridEngine3D", "t", "Did you mean parallel.t?"),
        ("strategies.Local", "devices", "devices is an option of --strategy auto, "),
        ("strategies.Colocated", "max_num_seqs", "Did you mean settings.vllm.max_num_seqs?"),
        ("strategies.Colocated", "settings.generate.slot", "Did you mean slots?"),
    ],
)
def test_what_was_meant(cls: str, option: str, expected: str) -> None:
    assert answer(cls, option).startswith(expected)


class Untyped(GRPO):
    """An algorithm with a class attribute that was meant as an option."""

    budget = 5.0


def test_an_attribute_without_a_type_is_no_option() -> None:
    said = option_error(
        f"Problem with given class_path '{__name__}.Untyped':\n    unrecognized arguments: --budget=1", {}
    )
    assert said.endswith(
        "budget is an attribute of Untyped without a type. Write `budget: float = 5.0` there."
    )


def test_a_class_that_refuses_its_options_says_so_alone() -> None:
    tried = (
        "Does not validate against any of the Union subtypes\nErrors:\n  - SampleTable(rows=0): is none.\n"
        "  - Not a valid subclass of Callback\n    Subclass types expect one of:\n    - a class path (str)\n"
        "    - a dict with class_path entry\n  - Expected a <class 'NoneType'>\nGiven value: [...]"
    )
    assert option_error(tried, {}) == "SampleTable(rows=0): is none."
    assert option_error("- Not a valid subclass of Callback", {}) == "Not a valid subclass of Callback"
    listed = tried.replace("  - SampleTable(rows=0): is none.\n", "")
    said = option_error(f'Parser key "mapping":\n{listed}', {})
    assert said == "mapping: Not a valid subclass of Callback. Got value: [...]"


@pytest.mark.parametrize(
    ("key", "name", "meant"),
    [
        ("trainer.callbacks", "SampelTable", "Did you mean SampleTable?"),
        ("trainer.logger", "csv", "Did you mean CSVLogger?"),
        ("trainer.logger", "8", "Type its import path."),
        ("trainer.logger", "CSVLogger,", "Type them one by one: --trainer.logger+=CSVLogger"),
        (
            "trainer.callbacks",
            "SampleTable,Rollouts",
            "Type them one by one: --trainer.callbacks+=SampleTable --trainer.callbacks+=Rollouts",
        ),
        (
            "trainer.logger",
            "LitLogger",
            "There is one of this name, but a package that it needs is not installed.",
        ),
        ("actor", "ModelCheckpoint", "Type its options one by one, such as actor.path."),
        ("actor", "", "Type its options one by one, such as actor.path."),
    ],
)
def test_a_name_that_is_no_class(key: str, name: str, meant: str) -> None:
    tried = f"  - Expected a dot import path string: {name}\n  - Expected a <class 'bool'>"
    said = f'Parser key "{key}":\n{tried}\nGiven value: {name}'
    assert option_error(said, {}) == f"{key}: {name!r} is not a class. {meant}"


@pytest.mark.parametrize(
    ("key", "tried", "told"),
    [
        (
            "lora",
            "Expected a dot import path string: true",
            "'true' is not a class. Type its options one by one, such as lora.rank.",
        ),
        (
            "optimizer",
            'Unable to load config \'3\'\n  - Parser key "optimizer": Unable to load config "3"',
            "'3' is not a group of options. Type its options one by one, such as optimizer.lr.",
        ),
        (
            "sampling",
            'Unable to load config "None"',
            "'None' is not a group of options. Type its options one by one, such as sampling.max_new_tokens.",
        ),
    ],
)
def test_one_value_for_several_options(key: str, tried: str, told: str) -> None:
    within = "Problem with given class_path 'rlhf_lightning.workers.Actor':\n"
    said = option_error(f'{within}  Parser key "{key}":\n  {tried}', {})
    assert said == f"rlhf_lightning.workers.Actor: {key}: {told}"


@pytest.mark.parametrize("path", ["", "a.b "], ids=["of the command", "of a class"])
def test_a_module_is_no_class(path: str) -> None:
    refused = f"Import path {path}does not correspond to a subclass of PPO\n  Given value: a.b"
    told = "algo: a.b is not a subclass of PPO. Type the import path of one, such as "
    assert option_error(f'Parser key "algo":\n    - {refused}', {}).startswith(told)


@pytest.mark.parametrize("option", FOLDERS)
@pytest.mark.parametrize(
    ("name", "meant"),
    [("a/b.py", "a.b.Mine"), ("./a/b.py:Own", "a.b.Own"), ("/a/b.py", "b.Mine"), ("../b.py:Own", "b.Own")],
)
def test_a_file_is_no_class(option: str, name: str, meant: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^--{option} {name}: is a file\. .*, such as {re.escape(meant)}\.$"
    ):
        class_path(option, name)


def test_one_value_for_all_options_of_the_trainer() -> None:
    decided = {
        f"trainer.{name}": "" for name in ("accelerator", "strategy", "devices", "num_nodes", "precision")
    }
    tried = 'Parser key "trainer": Unable to load config "3"'
    said = option_error(tried, {"trainer": Trainer}, elsewhere=decided)
    assert said.endswith("Type its options one by one, such as trainer.logger.")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "stop_strings: Expected a <class 'tuple'>. Got value: </a> b",
            "stop_strings: </a> b is not a list. Type '[\"</a> b\"]', with the brackets.",
        ),
        (
            "modules: Expected a <class 'tuple'>. Got value: q_proj,v_proj",
            'modules: q_proj,v_proj is not a list. Type \'["q_proj", "v_proj"]\', with the brackets.',
        ),
        (
            "betas: Expected a <class 'tuple'>. Got value: 0.9, 0.95",
            "betas: 0.9, 0.95 is not a list. Type '[0.9, 0.95]', with the brackets.",
        ),
        ("unrecognized arguments: a.yaml", "unrecognized arguments: a.yaml. Did you mean -c a.yaml?"),
        (
            "ids: Expected a <class 'tuple'>. Got value: 65",
            "ids: 65 is not a list. Type '[65]', with the brackets.",
        ),
        (
            "pools: Expected a <class 'tuple'>. Got value: {'all': 2}",
            "pools: {'all': 2} is not a list. Type '[{...}]', with the brackets.",
        ),
        (
            "texts: Expected a <class 'tuple'>. Got value: {'User': 'you'}",
            "texts: {'User': 'you'} is not a list. Type '[\"User: you\"]', with the brackets.",
        ),
        (
            "optimizer: Subclasses are disabled for OptimizerSpec, thus 'torch.optim.SGD' is not accepted as "
            "class_path. To accept subclasses use set_parsing_settings(subclasses_enabled=[OptimizerSpec]).",
            "optimizer: torch.optim.SGD is a class, and there is none to choose. Type the options of "
            "OptimizerSpec one by one.",
        ),
    ],
)
def test_what_to_type_instead(said: str, told: str) -> None:
    assert option_error(said, {}) == told


def test_a_reason_is_said_without_the_other_types_that_were_tried() -> None:
    tried = (
        "Errors:\n  - Problem with given class_path 'my.Logger':\n      Requirement 'mlflow' not met.\n"
        "  - Expected a <class 'collections.abc.Iterable'>\n  - Expected a <class 'bool'>\n"
        "Given value: Namespace(class_path='my.Logger')"
    )
    assert option_error(tried, {}) == "my.Logger: Requirement 'mlflow' not met."
    once = "  - Problem with given class_path 'my.Mine':\n      No module named 'my'\n"
    assert option_error(f"Errors:\n{once}{once}Given value: my.Mine", {}) == "my.Mine: No module named 'my'"


@pytest.mark.parametrize(
    "tried", ["no.yaml: No module named 'no'", "Unexpected import path format: no/no.yml"]
)
def test_a_file_that_is_not_there_is_no_module(tried: str) -> None:
    said = option_error(f"Parser key \"strategy\":\n  Problem with given class_path 'Auto':\n    {tried}", {})
    name = "no/no.yml" if "/" in tried else "no.yaml"
    assert said == f"strategy: Auto: {name}: there is no such file."


def test_what_was_written_is_said() -> None:
    tried = (
        "Parser key \"devices\":\n  Errors:\n    - Expected a <class 'int'>\n"
        "    - Expected a <class 'NoneType'>\n  Given value type: <class 'str'>\n  Given value: two"
    )
    assert option_error(tried, {}) == "devices: Expected a <class 'int'>. Got value: two"


def test_an_option_of_the_trainer_without_its_prefix() -> None:
    said = option_error("unrecognized arguments: --max_steps 3", {"trainer": Trainer})
    assert said == "unrecognized arguments: --max_steps 3. Did you mean --trainer.max_steps?"
    trained = " or ".join(f"--algo.{role}.optimizer.lr" for role in ("actor", "reward", "cost"))
    for name in ("learning_rate", "lr"):
        said = option_error(f"unrecognized arguments: --{name} 1e-5", {"trainer": Trainer})
        assert said.endswith(f"Did you mean {trained}?")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--generation_batch_size 8", "An iteration answers --data.batch_size prompts, each --algo."),
        (
            "--per_device_train_batch_size 8",
            "Micro-batches are counted in tokens, --strategy.settings.train.",
        ),
        ("--trainer.ckpt_path last", "Did you mean --ckpt_path?"),
        ("--ckpt last", "Did you mean ckpt_path?"),
        ("--trainer.total_epochs 3", "Did you mean --trainer.max_epochs?"),
        ("--trainer.resume_from_checkpoint x", "Type --ckpt_path last, or the path of a checkpoint."),
        ("--report_to x", "Type --trainer.logger CLASS, or false for none."),
        ("--trainer.project_name x", "Type --trainer.logger WandbLogger --trainer.logger.project NAME."),
        (
            "--run_name x",
            "Type --trainer.logger WandbLogger --trainer.logger.name NAME; --trainer.logger.project",
        ),
        ("--trainer.experiment_name x", "Type --trainer.logger WandbLogger --trainer.logger.name NAME;"),
        ("--loss_type sft", "It is the loss of --algo sft and kto: leave it out. A part of "),
        ("--critic.adam.lr 1e-6", "Did you mean --algo.critic.optimizer.lr?"),
        ("data.train_files=x a.b=c", "Options begin with two dashes. Did you mean --data.path?"),
        ("+actor_rollout_ref.rollout.n=5", "Options begin with two dashes. Did you mean --algo.group_size?"),
        ("trainer.logger=x a.b=c", "Options begin with two dashes. Type --trainer.logger=x."),
        ("+trainer.logger=x", "Options begin with two dashes. Type --trainer.logger=x."),
    ],
)
def test_options_of_other_systems(typed: str, told: str) -> None:
    said = option_error(f"unrecognized arguments: {typed}", {"trainer": Trainer})
    assert said.startswith(f"unrecognized arguments: {typed}. {told}")


def test_what_they_are_here_are_options() -> None:
    owners = [("trainer", Trainer), *((kind, cls) for kind in FOLDERS for cls in choices(kind).values())]
    known = {f"{kind}.{path}" for kind, cls in owners for path in option_paths(cls)}
    named = {path for here in OTHERS.values() if not isinstance(here, str) for path in here}
    assert named - known == {"seed_everything"}
    said = " ".join(here for here in OTHERS.values() if isinstance(here, str))
    told = {str(path) for path in re.findall(r"--([a-z]+\.[\w.]+\w)", said)}
    assert {path for path in told if not path.startswith(("trainer.callbacks", "trainer.logger."))} <= known


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--group_size 4", "Did you mean --algo.group_size?"),
        ("--actor.path x", "Did you mean --algo.actor.path?"),
        ("--batch_size 4", "Did you mean --data.batch_size?"),
        ("--settings.engine zero", "Did you mean --strategy.settings.engine?"),
        ("--devices 2", "The strategy divides them."),
        ("--trainer.max-steps 3", "Did you mean max_steps?"),
        ("--ckpt-path last", "Did you mean ckpt_path?"),
        ("--print-config", "Did you mean print_config?"),
        ("--algorithm ppo", "Did you mean algo?"),
        ("--datamodule taskdata", "Did you mean data?"),
    ],
)
def test_an_option_without_its_prefix_or_with_hyphens(typed: str, told: str) -> None:
    decided = {"trainer.devices": "The strategy divides them."}
    said = option_error(f"unrecognized arguments: {typed}", {"trainer": Trainer}, elsewhere=decided)
    assert said == f"unrecognized arguments: {typed}. {told}"


def test_a_short_name_that_is_nearly_right() -> None:
    for option, name, near in (
        ("algo", "safe_rlhf", "saferlhf"),
        ("algo", "dr_grpo", "grpo"),
        ("strategy", "hybrid_3d", "hybrid3d"),
        ("strategy", "HybridEngine3D", "hybrid3d"),
        ("data", "PromptsData", "promptdata"),
    ):
        with pytest.raises(ValueError, match=rf"^--{option} {name}: unknown\. Did you mean {near}\? Known: "):
            class_path(option, name)


def test_helpers_of_data_modules_are_no_choice() -> None:
    assert {name for name in choices("data") if not name.endswith("data")} == set()


def test_a_misspelt_group_of_options() -> None:
    said = "Subcommand 'fit' does not accept option 'strategi'"
    assert option_error(said, {"trainer": Trainer}) == f"{said}. Did you mean strategy?"
    assert option_error("unrecognized arguments: --dta x", {"trainer": Trainer}).endswith(
        "Did you mean data?"
    )


def test_what_a_class_lacks_is_said_alone() -> None:
    lacks = "the following arguments are required: save_dir"
    tried = f"  - CSVLogger:\n    {lacks}\n  - Expected a <class 'bool'>. Got value: CSVLogger"
    said = f'Parser key "trainer.logger":\n{tried}'
    assert option_error(said, {}).endswith(lacks)
    said = "the following arguments are required: fit.algo, fit.data"
    assert option_error(said, {}) == "the following arguments are required: --algo NAME, --data NAME"
    said = "Problem with class_path 'rlhf_lightning.functional.SFTLoss': Option 'beta' is not accepted"
    assert option_error(said, {"algo": SFT}).endswith(". SFTLoss has: coef, aggregation, horizon.")


@pytest.mark.parametrize(
    ("option", "path", "told"),
    [
        ("algo", "rlhf_lightning.algos.ppo.PPPO", " Did you mean PPO?"),
        ("algo", "rlhf_lightning.algos.safe_rlhf.Mine", " Type one of PPO, SafeRLHF."),
        ("data", "rlhf_lightning.data.Mine", " Type one of CompletionData, "),
        ("strategy", "json.Mine", " No class there is derived from Strategy. Write one, or "),
    ],
)
def test_a_class_that_its_module_lacks(option: str, path: str, told: str) -> None:
    module, _, name = path.rpartition(".")
    said = f"{option}: {path}: module '{module}' has no attribute '{name}'"
    assert option_error(said, {}).startswith(f"{said}.{told}")


def test_what_a_callback_says_of_a_value_stands_alone() -> None:
    own = "- Problem with given class_path 'rlhf_lightning.callbacks.Rollouts':\n  Parser key \"rows\":\n"
    base = "- Problem with given class_path 'lightning.Callback':\n  Option 'rows' is not accepted"
    said = f"{own}    Expected a <class 'int'>. Got value: x\n    {base}\n    - Expected a <class 'NoneType'>"
    told = "rlhf_lightning.callbacks.Rollouts: rows: Expected a <class 'int'>. Got value: x"
    assert option_error(said, {}) == told
