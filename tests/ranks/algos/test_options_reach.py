"""Options of an algorithm reach what they are about: its estimator, and the steps of its optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import CISPO, DAPO, GMPO, GRPO, OPO, PPO, RLOO, ReinforcePP, ReMax, SafeRLHF
from rlhf_lightning.controller import Batch
from rlhf_lightning.functional import (
    CISPOLoss,
    Estimator,
    GAEEstimator,
    GeometricPolicyLoss,
    GreedyEstimator,
    GroupEstimator,
    LagrangianEstimator,
    Overlong,
    PolicyLoss,
    ReinforceLoss,
    ReturnEstimator,
)
from rlhf_lightning.running import KLPenalty, Scaling
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor
from tests.ranks.algos.test_online import ONLINE, data, make
from tests.unit.algos.short import trainer
from tests.unit.algos.small import run

KL = KLPenalty(coef=0.3, estimator="k3")


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (
            GRPO(group_size=3, baseline="leave_one_out", scale="none", reward_kl_coef=0.3),
            GroupEstimator(group_size=3, baseline="leave_one_out", scale="none", kl_coef=0.3),
        ),
        (
            DAPO(group_size=3, overlong=Overlong(buffer=2)),
            GroupEstimator(group_size=3, overlong=Overlong(buffer=2)),
        ),
        (
            ReinforcePP(group_size=3, gamma=0.9, reward_kl_coef=0.3),
            ReturnEstimator(group_size=3, gamma=0.9, kl_coef=0.3),
        ),
        (ReMax(gamma=0.9, clip=2.0, reward_kl_coef=0.3), GreedyEstimator(gamma=0.9, clip=2.0, kl_coef=0.3)),
        (ReMax(form="verl"), GreedyEstimator(form="verl", kl_coef=0.05)),
        (
            RLOO(group_size=3),
            GroupEstimator(group_size=3, baseline="leave_one_out", scale="none", kl_coef=0.05),
        ),
        (
            OPO(group_size=3),
            GroupEstimator(group_size=3, baseline="length_weighted", scale="none", kl_coef=0.0),
        ),
    ],
)
def test_the_estimator_of_answers_alone(algorithm: GRPO | ReinforcePP | ReMax, expected: Estimator) -> None:
    assert algorithm.estimator() == expected


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (RLOO(), PolicyLoss()),
        (OPO(), ReinforceLoss()),
        (DAPO(), PolicyLoss(clip_low=0.2, clip_high=0.28)),
        (CISPO(), CISPOLoss()),
        (GMPO(), GeometricPolicyLoss()),
    ],
)
def test_the_loss_where_none_is_typed(algorithm: GRPO, expected: PolicyLoss) -> None:
    assert algorithm.policy_loss == expected


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (
            PPO(gamma=0.9, lam=0.8, whiten=False, kl=KL, scaling=Scaling(reward_clip=2.0)),
            GAEEstimator(gamma=0.9, lam=0.8, whiten=False, kl_coef=0.3, kl_estimator="k3", score_clip=2.0),
        ),
        (
            SafeRLHF(gamma=0.9, lam=0.8, whiten=True, kl=KL, multiplier=2.0, cost_critic=None),
            LagrangianEstimator(
                gamma=0.9,
                lam=0.8,
                whiten=True,
                kl_coef=0.3,
                kl_estimator="k3",
                multiplier=2.0,
                cost_critic=False,
            ),
        ),
    ],
)
def test_the_estimator_beside_a_critic(algorithm: PPO, expected: Estimator, tmp_path: Path) -> None:
    algorithm.trainer = trainer(Local(), tmp_path)
    assert algorithm.estimator(Batch({}, num_rows=0)) == expected


@pytest.mark.parametrize("name", ONLINE)
def test_each_pass_steps_once_for_each_mini_batch(name: str, model: str) -> None:
    rows = 6 if name == "OnlineDPO" else 2  # which leaves out pairs with equal scores

    def steps(**more: int) -> int:
        """By the learning rate, which rises by the same with each."""
        slowly = OptimizerSpec(lr=1e-6, warmup_steps=99)
        actor = Actor(path=model, optimizer=slowly, sampling=Sampling(max_new_tokens=6))
        algorithm: RLHFAlgorithm = make(name, model, **{"actor": actor, **more})
        return round(run(algorithm, data(rows), steps=1).numbers[0]["actor/lr"] * 1e8)

    once = steps(mini_batch_size=1)
    assert once > 1
    assert steps(mini_batch_size=1, epochs=2) == 2 * once


@pytest.mark.parametrize("name", ["DAPO", "GRPO", "ReMax", "ReinforcePP"])
def test_a_divergence_in_the_loss_alone_has_its_reference(name: str, model: str) -> None:
    loss = PolicyLoss(kl_coef=0.1)
    kept = run(make(name, model, policy_loss=loss, reward_kl_coef=0.0), data(), steps=1)
    assert "actor/kl_loss" in kept.numbers[0]
