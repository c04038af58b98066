"""Values of fields in Python, where nothing else compares them with their types."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_lightning.algos import GRPO, PPO
from rlhf_lightning.checks import check_fields
from rlhf_lightning.data import PreferenceData, TaskData
from rlhf_lightning.functional import (
    GAEEstimator,
    GreedyEstimator,
    GroupEstimator,
    LagrangianEstimator,
    Loss,
    PolicyLoss,
    ReturnEstimator,
    SFTLoss,
    ValueLoss,
    gae,
)
from rlhf_lightning.running import KLPenalty, Scaling
from rlhf_lightning.spec import LoRA, OptimizerSpec, Sampling
from rlhf_lightning.workers import Actor, Opponent, Reference, Reward


@pytest.mark.parametrize(
    ("cls", "options", "said"),
    [
        (
            GroupEstimator,
            {"group_size": 2, "baseline": "med"},
            r"baseline='med'\): has to be 'mean' or 'leave_one_out' or ",
        ),
        (GroupEstimator, {"group_size": 2, "scale": "foo"}, r"scale='foo'\): has to be 'std' or 'none'"),
        (GroupEstimator, {"group_size": "3"}, r"GroupEstimator\(group_size='3'\): has to be of type int"),
        (GroupEstimator, {"group_size": True}, "group_size=True"),
        (GAEEstimator, {"gap": "foo"}, r"gap='foo'\): has to be 'carry' or 'zero'"),
        (GreedyEstimator, {"form": "foo"}, r"form='foo'\): has to be 'official' or 'verl'"),
        (ReturnEstimator, {"credit": "foo"}, r"credit='foo'\): has to be 'to_go' or 'outcome'"),
        (ReturnEstimator, {"gap": "foo"}, "gap='foo'"),
        (LagrangianEstimator, {"whiten": "no"}, r"whiten='no'\): has to be of type bool"),
        (PolicyLoss, {"kl_estimator": "k9"}, r"kl_estimator='k9'\): has to be 'k1' or 'k2'"),
        (PolicyLoss, {"correction": {"high": 2.0}}, r"has to be of type OffPolicyCorrection or None"),
        (KLPenalty, {"estimator": "k9"}, "estimator='k9'"),
        (
            OptimizerSpec,
            {"schedule": "cosin", "total_steps": 5},
            r"schedule='cosin'\): has to be 'constant' or ",
        ),
        (OptimizerSpec, {"lr": "1e-3"}, r"OptimizerSpec\(lr='1e-3'\): has to be of type float"),
        (LoRA, {"rank": 4.5}, r"LoRA\(rank=4.5\): has to be of type int"),
        (Sampling, {"max_new_tokens": "3"}, r"max_new_tokens='3'\): has to be of type int"),
        (Reference, {"temperature": "1"}, r"Reference\(temperature='1'\): has to be of type float or None"),
        (Opponent, {"decay": "x"}, r"Opponent\(decay='x'\): has to be of type float or None"),
        (Scaling, {"reward_clip": "5"}, r"Scaling\(reward_clip='5'\): has to be of type float or None"),
        (
            LoRA,
            {"target_modules": "q_proj"},
            r"target_modules='q_proj'\): has to be of type tuple\[str, \.\.\.\]",
        ),
        (Sampling, {"stop_token_ids": 3}, r"stop_token_ids=3\): has to be of type tuple\[int, \.\.\.\]"),
        (Sampling, {"stop_strings": "</answer>"}, r"has to be of type tuple\[str, \.\.\.\]"),
        (OptimizerSpec, {"betas": (0.9,)}, r"betas=\(0.9,\)\): has to be of type tuple\[float, float\]"),
        (TaskData, {"batch_size": 2.5}, r"data\.batch_size=2\.5: has to be of type int"),
        (
            PreferenceData,
            {"path": "x", "safe_fields": "safe"},
            r"data\.safe_fields='safe': has to be of type tuple\[str, str\] or None",
        ),
        (PolicyLoss, {"kl_coef": math.nan}, r"PolicyLoss\(kl_coef=nan\): is not a finite number"),
        (
            OptimizerSpec,
            {"lr": math.inf},
            r"OptimizerSpec\(lr=inf\): is not a finite number. Type one, or leave lr out",
        ),
    ],
    ids=str,
)
def test_what_is_refused_when_it_is_made(cls: type, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cls(**options)


ROLES = {"actor": Actor, "reward": Reward}


@pytest.mark.parametrize(
    ("algorithm", "role", "options", "said"),
    [
        (GRPO, "", {"baseline": "med"}, "GRPO(baseline='med'): has to be 'mean'"),
        (GRPO, "actor", {"dtype": "bf16"}, "actor.dtype='bf16': has to be 'float32' or 'bfloat16' or None"),
        (GRPO, "actor", {"optimizer": {"lr": 1.0}}, "actor.optimizer={'lr': 1.0}: has to be of type Opti"),
        (PPO, "reward", {"per_token": "step"}, "reward.per_token='step': has to be 'outcome' or"),
        (PPO, "", {"epochs": 1.5}, "PPO(epochs=1.5): has to be of type int"),
        (PPO, "", {"policy_loss": None}, "PPO(policy_loss=None): has to be of type PolicyLoss"),
        (PPO, "", {"stop_kl": math.nan}, "PPO(stop_kl=nan): is not a finite number"),
        (PPO, "", {"value_loss": ValueLoss(coef=math.inf)}, "value_loss.coef=inf: is not a finite number"),
        (PPO, "", {"ptx_loss": SFTLoss(coef="1")}, "ptx_loss.coef='1': has to be of type float"),  # type: ignore[arg-type]
        (PPO, "reward", {"clip": math.inf}, "reward.clip=inf: is not a finite number"),
    ],
)
def test_what_is_refused_of_an_algorithm_before_anything_starts(
    algorithm: type[GRPO | PPO], role: str, options: dict[str, object], said: str
) -> None:
    made = algorithm(**{role: ROLES[role](**options)} if role else options)
    with pytest.raises(ValueError, match=r".") as caught:
        check_fields(made)
    assert str(caught.value).startswith(said)


def test_other_numbers_and_paths_are_taken() -> None:
    OptimizerSpec(lr=1, betas=[0, 0.99], warmup_steps=np.int64(3), weight_decay=np.float32(0.1))  # type: ignore[arg-type]
    Sampling(temperature=0)
    GAEEstimator(score_scale=torch.tensor(2.0))  # type: ignore[arg-type]
    check_fields(GRPO(actor=Actor(path=Path("embedded"))))  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["actor", "reward"])
@pytest.mark.parametrize("path", ["/nowhere", "nowhere", Path("nowhere")])
def test_a_path_of_no_directory_is_refused_before_data_are_read(role: str, path: str) -> None:
    with pytest.raises(ValueError, match=rf"^{role}\.path={path}: no such directory\. Type the path"):
        check_fields(GRPO(**{role: ROLES[role](path=path)}))


def test_words_of_enumerations_and_of_numpy_are_taken() -> None:
    class Word(StrEnum):
        MEAN = "mean"

    for word in (Word.MEAN, np.str_("mean")):
        check_fields(GRPO(baseline=word))  # type: ignore[arg-type]
    GAEEstimator(whiten=np.bool_(True))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epochs=True"):
        check_fields(PPO(epochs=True))


@dataclass(frozen=True, kw_only=True)
class Odd(GAEEstimator):
    """With annotations that say something to readers alone."""

    plan: "Nothing" | None = None  # type: ignore[name-defined]  # noqa: F821, UP037


@dataclass(frozen=True, kw_only=True)
class Listed(GAEEstimator):
    """Likewise."""

    bounds: [float] = (1.0,)  # type: ignore[misc, valid-type]


class Later(GRPO):
    """Has a field that is set later."""

    seen: int = field(init=False)


class Bare(Loss):
    """A loss that is no dataclass."""

    def __call__(self, *_: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        raise NotImplementedError


def test_another_loss_is_taken_and_none_or_a_function_is_not() -> None:
    check_fields(PPO(policy_loss=Bare()))  # type: ignore[arg-type]
    for wrong in (None, {"clip_low": 0.1}, len, PPO):
        with pytest.raises(ValueError, match=r"policy_loss=.*: has to be of type PolicyLoss"):
            check_fields(PPO(policy_loss=wrong))  # type: ignore[arg-type]


def test_annotations_that_are_no_types_and_fields_that_are_set_later_pass() -> None:
    Odd()
    Listed(bounds=[2.0])
    check_fields(Later())


class Mine(GRPO):
    """Says None of what it does not know yet, without the type, as people write."""

    budget: float = None  # type: ignore[assignment]


def test_a_default_is_taken_whatever_its_type() -> None:
    check_fields(Mine())
    with pytest.raises(ValueError, match=r"Mine\(budget='5'\): has to be of type float"):
        check_fields(Mine(budget="5"))  # type: ignore[arg-type]


def test_words_of_functions() -> None:
    zeros = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"gae\(gap='foo'\): unknown. Try 'carry' or 'zero'"):
        gae(zeros, zeros, zeros.bool(), gamma=1.0, lam=1.0, gap="foo")  # type: ignore[arg-type]


class Spelt(PolicyLoss):
    """Names its column by a text."""

    columns = "advantages"  # type: ignore[assignment]


class Called(PolicyLoss):
    """Names its columns in a plain method."""

    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("advantages",)


def test_one_text_in_the_place_of_names_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Called\.columns is a method\. Put @property above it\.$"):
        check_fields(PPO(policy_loss=Called()))
    made = PPO(policy_loss=Spelt())
    with pytest.raises(ValueError, match=r"^Spelt\.columns='advantages': is one text, .* \('advantages',\)"):
        check_fields(made)
    for option in ("needs", "validates", "progress"):
        told = type("Told", (GRPO,), {option: "reward"})()
        with pytest.raises(ValueError, match=rf"^Told\.{option}='reward': is one text"):
            check_fields(told)


@pytest.mark.parametrize("name", ["explain", "advantages_on", "_first", "log", "trainer", "training"])
def test_a_name_that_the_base_uses_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^Mine\.{name}: .* such as own_{name.strip('_')}\.$"):
        type("Mine", (GRPO,), {"__annotations__": {name: int}, name: 4})


def test_what_a_subclass_declares_may_be_an_option() -> None:
    names = {"progress": tuple[str, ...], "draws": bool, "rollouts": int}
    made = type("Mine", (GRPO,), {"__annotations__": names, "progress": (), "draws": False, "rollouts": 4})
    check_fields(made(draws=True))


def test_a_type_that_is_not_there_yet_is_told_of() -> None:
    said = r"^Early: the type of a field names Unborn, which is not there where the class is defined\. De"
    with pytest.raises(ValueError, match=said):
        type("Early", (GRPO,), {"__annotations__": {"later": "Unborn"}, "later": None})
