"""docs/coming_from.md: its options are there, and the defaults that it compares are those of the classes."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import get_args, get_type_hints

import pytest
import torch
from lightning.pytorch import Trainer

from rlhf_lightning.algos import (
    DAPO,
    DPO,
    GRPO,
    KTO,
    PPO,
    RLOO,
    SFT,
    Distillation,
    ReinforcePP,
    ReMax,
    RewardModel,
    SimPO,
)
from rlhf_lightning.data import CompletionData, PreferenceData, PromptData
from rlhf_lightning.engines.optimizer import adamw
from rlhf_lightning.functional import OffPolicyCorrection, Overlong, group_advantages
from rlhf_lightning.names import FOLDERS, choices
from rlhf_lightning.options import option_paths
from rlhf_lightning.rewards import RewardSpec, score
from rlhf_lightning.rewards.spec import DEFAULT
from rlhf_lightning.spec import LoRA, OptimizerSpec
from rlhf_lightning.strategies import HybridEngine3D
from rlhf_lightning.usage import option_error
from tests.conftest import ROOT


def holds(kind: object, names: Sequence[str]) -> bool:
    """Whether an option of these names is a field of a dataclass, or of one of a union's."""
    found = [one for one in (get_args(kind) or (kind,)) if isinstance(one, type)]
    fields = [get_type_hints(one) for one in found if dataclasses.is_dataclass(one)]
    first, rest = names[0], names[1:]
    return any(first in known and (not rest or holds(known[first], rest)) for known in fields)


OWNERS = {
    "algo": (GRPO, PPO, DAPO, DPO, KTO, RewardModel, Distillation, ReMax, SimPO),
    "strategy": (HybridEngine3D,),
    "data": (PromptData, CompletionData, PreferenceData),
}


COMING = (ROOT / "docs/coming_from.md").read_text()
DIFFERENT = COMING.partition("## What is not the same by default")[2]


def test_options_that_documents_set_beside_those_of_others_are_there() -> None:
    rows = [line.split(" | ")[-1] for line in COMING.splitlines() if line.startswith("| ")]
    written = [name for part in (*rows, DIFFERENT) for name in re.findall(r"[` ]--([\w.]+)", part)]
    assert len(written) > 40
    for name in written:
        owner, *rest = name.split(".")
        if owner == "trainer":
            assert rest[0] in inspect.signature(Trainer).parameters, name
        else:
            assert any(holds(kind, rest) for kind in OWNERS[owner]) if rest else owner != "data", name


NO_OPTIONS = (
    *("reward_model.ground_truth", "data_source", "completion", "messages", "margin"),  # columns of a row
    *("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "PeftModel"),
    *("GKDTrainer", "DistillationTrainer"),
    *("accelerate", "one_step_off_policy"),  # a program, a recipe
    *("sft", "critic.", "reward."),  # a value, other beginnings of a name
)
"""Names in the columns of the other systems that nobody types as options."""


def names_there() -> list[str]:
    """The options of other systems that the tables name."""
    rows = [line.split("|")[1:-1] for line in COMING.splitlines() if line.startswith("| ")]
    columns = [cell for row in rows for cell in (row[1:-1] if row[2:] else row[:1])]
    quoted = {name for cell in columns for name in re.findall("`([^`]+)`", cell)}
    assert set(NO_OPTIONS) <= quoted
    return sorted({re.sub("^accelerate launch --| bf16$", "", name) for name in quoted - set(NO_OPTIONS)})


@pytest.mark.parametrize("typed", ["--{} 1", "{}=1 a.b=c"])
def test_options_of_the_tables_are_answered_with_options(typed: str) -> None:
    owners = [("trainer", Trainer), *((kind, cls) for kind in FOLDERS for cls in choices(kind).values())]
    known = {*FOLDERS, "seed_everything", "ckpt_path"}
    known |= {f"{kind}.{path}" for kind, cls in owners for path in option_paths(cls)}
    assert len(names_there()) > 120
    for name in set(names_there()) - known:
        said = option_error(f"unrecognized arguments: {typed.format(name)}", {"trainer": Trainer})
        told = re.sub(r".* (a\.b=c\. Options begin with two dashes|1)\. ", "", said)
        options = re.findall(r"--(?!trainer\.callbacks|trainer\.logger\.)([a-z_]+(?:\.\w+)*)", told)
        assert "--" in told or told.endswith(("leave it out.", "dropped, and counted.")), (name, told)
        assert set(options) <= known, (name, told)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("model.partial_pretrain", "Did you mean --algo.actor.path?"),
        ("data.response_key", "Did you mean --data.response_field?"),
        ("data.multiturn.messages_key", "Did you mean --data.response_field?"),
        ("data.multiturn.enable", "Did you mean --data.every_answer?"),
        ("data.prompt_dict_keys", "Type both names with a dot between them, such as --data.prompt_field"),
        ("data.micro_batch_size_per_gpu", "Micro-batches are counted in tokens, --strategy.settings."),
        ("data.balance_dp_token", "There is nothing to set: leave it out."),
        (
            "optim.warmup_steps_ratio",
            "Type --algo.actor.optimizer.warmup_ratio R, a share of optimizer.",
        ),
        ("padding_free", "Nothing is padded: leave it out."),
        ("trainer.n_gpus_per_node", "Type --strategy.devices N, the GPUs of all nodes together, or leave"),
    ],
)
def test_options_of_other_sft_trainers_are_answered(option: str, said: str) -> None:
    parts = {"algo": SFT, "data": CompletionData, "trainer": Trainer}
    told = option_error(f"unrecognized arguments: --{option} 1", parts)
    assert f"--{option} 1. {said}" in told


def here(what: str, *theirs: str) -> str:
    """A default here, as the table has it beside those of verl, TRL and OpenRLHF."""
    (cells,) = (row.split("|")[2:6] for row in DIFFERENT.splitlines() if row.startswith(f"| {what} |"))
    found, *others = (cell.strip() for cell in cells)
    assert not theirs or tuple(others) == theirs
    return found


def test_defaults_that_differ_from_those_of_others_are_documented() -> None:
    ppo, grpo, lora = PPO(), GRPO(), LoRA(rank=8)
    assert here("type of the computation", *3 * ("bfloat16",)) == grpo.actor.computes_in
    assert here("activations computed again") == ("yes" if grpo.actor.gradient_checkpointing else "no")
    assert here("longest answer, tokens") == str(grpo.actor.sampling.max_new_tokens)
    assert here("prompts of an iteration") == str(PromptData(path="x").batch_size)
    assert here("mean of GRPO's loss") == grpo.policy_loss.aggregation
    assert here("KL in GRPO's loss") == str(grpo.policy_loss.kl_coef)
    assert here("KL in the reward of PPO") == str(ppo.kl.coef)
    assert here("lam of PPO", "1.0", "", "1") == str(ppo.lam)
    assert here("value clip of PPO", "0.5", "", "0.5") == str(ppo.value_loss.clip)
    assert here("dual clip", "3.0", "", "") == (ppo.policy_loss.dual_clip or "none")
    assert here("passes of PPO over a batch", "", "4", "") == str(ppo.epochs)
    assert here("temperature", "", "PPO 0.7", "") == str(ppo.actor.sampling.temperature)
    optimizers = [role.optimizer for role in (ppo.actor, ppo.critic)]
    rates = ", ".join(f"{one.lr:.0e}".replace("e-0", "e-") for one in optimizers)
    assert here("learning rates of actor and critic", "the critic's 1e-5", "PPO 3e-6, both", "") == rates
    assert {here("gradients limited to a norm of")} == {str(one.grad_clip) for one in optimizers}
    assert here("weight decay", "0.01", "", "") == str(optimizers[0].weight_decay)
    assert here("schedule of the learning rate") == optimizers[0].schedule
    assert here("Adam's betas", "", "", "0.9, 0.95") == ", ".join(map(str, optimizers[0].betas))
    in_reward = [str(kind().reward_kl_coef) for kind in (ReinforcePP, RLOO, ReMax)]
    assert here("KL in the reward of REINFORCE++, RLOO and ReMax") == ", ".join(in_reward)
    assert here("answers to a prompt, RLOO", "", "2", "") == str(RLOO().group_size)
    assert here("beta and gamma of SimPO") == f"{SimPO().loss.beta}, {SimPO().loss.gamma}"
    assert here("LoRA's alpha", "16", "", "16") == f"{lora.alpha:.0f}"
    assert here("LoRA's layers") == (lora.target_modules or "all linear ones")
    taught = Distillation()
    given = f"{taught.loss.beta}, {taught.given:.0f}"
    assert here("beta of distillation, share of given answers") == given
    learned = [SFT().actor.optimizer.lr, RewardModel().reward.optimizer.lr]
    assert here("learning rates of SFT and of a reward model") == ", ".join(
        f"{rate:.0e}".replace("e-0", "e-") for rate in learned
    )
    assert here("limit of scores", "", "", "10") == (ppo.reward.clip or "none")


def test_what_differs_otherwise_is_documented() -> None:
    said = " ".join(DIFFERENT.split())
    assert "Of a run that begins with adapters the reference is the base model, as in verl (TRL: the" in said
    assert Distillation().actor.sampling.temperature == 1.0
    assert "own answers at the temperature that drew them, 1.0;" in said
    correction = OffPolicyCorrection()
    assert (correction.low, correction.high, correction.mode) != (0.5, 5.0, "truncate")
    assert "correction.low 0.5 --algo.policy_loss.correction.high 5` (its" in COMING
    assert f"`{DEFAULT}`" in said
    assert GRPO().mini_batch_size == 0
    assert "`mini_batch_size` counts answers, and 0, the default, is one step over all of them." in said


def test_an_overlong_penalty_is_half_as_large_beside_scores_of_0_and_1() -> None:
    assert "`penalty_factor` 1, is `--algo.overlong.factor 0.5`" in " ".join(DIFFERENT.split())
    right, group = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    theirs, ours = (
        Overlong(buffer=4, factor=factor).penalty(torch.tensor([10, 8, 3, 9]), max_tokens=10)
        for factor in (1.0, 0.5)
    )
    wanted = group_advantages(2 * right - 1 + theirs, group)
    torch.testing.assert_close(group_advantages(right + ours, group), wanted)


def test_weight_decay_is_of_all_weights_as_documented() -> None:
    assert "`weight_decay` (OpenRLHF's too: not of norms and biases) | `--algo.actor.optimizer.w" in COMING
    scale = torch.nn.LayerNorm(2)
    for parameter in scale.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adamw(scale.parameters(), OptimizerSpec(lr=0.1, weight_decay=1.0), fused=False).step()
    assert scale.weight.tolist() == pytest.approx([0.9, 0.9])


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> object:
    """As `custom_reward_function` is written."""
    right = solution_str == ground_truth
    return {"score": 2.0 * right, "acc": right} if extra_info else float(right)


def of_trl(
    completions: list[list[dict[str, str]]], answer: list[str], **columns: list[str]
) -> list[float | None]:
    """As one of `reward_funcs` is written."""
    assert set(columns) == {"prompts"}
    said = [messages[0]["content"] for messages in completions]
    return [None if s == "?" else float(s == a) for s, a in zip(said, answer, strict=True)]


def of_openrlhf(queries: list[str], prompts: list[str], labels: list[str], **kwargs: object) -> object:
    """As a file named by `reward.remote_url` is written."""
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    scores = [2.0 * (said == label) for said, label in zip(answers, labels, strict=True)]
    return {"rewards": torch.tensor(scores), "scores": torch.tensor(scores) / 2, "extra_logs": {}}


@pytest.mark.parametrize(
    ("name", "module", "function", "scores"),
    [
        ("of_openrlhf", "openrlhf_reward.reward_func", of_openrlhf, [2.0, 2.0, 0.0]),
        ("of_verl", "verl_reward.compute_score", of_verl, [1.0, 2.0, 0.0]),
        ("of_trl", "trl_reward.accuracy", of_trl, [1.0, 1.0, 0.0]),
    ],
)
def test_their_reward_functions_are_called_as_documented(
    name: str, module: str, function: object, scores: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a module in the place of the reader's, whose names stand in `sys.modules` alone."""
    file, attribute = module.split(".")
    for path in ("my_package", f"my_package.{file}", f"{__name__}.mine"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    setattr(sys.modules[f"my_package.{file}"], attribute, function)
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", COMING, re.DOTALL) if f"def {name}(" in block
    )
    mine = sys.modules[f"{__name__}.mine"]
    exec(code, vars(mine))  # noqa: S102 - the package's own document
    rows: list[dict[str, object]] = [
        {"data_source": "s", "answer": "5", "extra_info": n == 1} for n in range(3)
    ]
    spec = RewardSpec(functions={f"{__name__}.mine.{name}": 1.0})
    assert score(spec, ["p"] * 3, ["5", "5", "?"], rows)["scores"] == scores
