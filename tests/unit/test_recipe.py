"""A recipe of another system typed as it is: what each of its options is told."""

from __future__ import annotations

import pytest
from lightning.pytorch import Trainer

from rlhf_lightning.algos import PPO
from rlhf_lightning.usage import option_error, option_errors

OWNERS = {"trainer": Trainer, "algo": PPO}


def told(typed: str) -> str:
    return option_errors(f"unrecognized arguments: {typed}", OWNERS, elsewhere={})


VERL = (
    "data.train_files=a.parquet +algorithm.use_kl_in_reward=False critic.optim.lr=1e-5",
    [
        "3 unknown options. Options begin with two dashes.",
        "data.train_files=a.parquet. Did you mean --data.path?",
        "+algorithm.use_kl_in_reward=False. Type --algo.reward_kl_coef 0, of PPO --algo.kl.coef 0.",
        "critic.optim.lr=1e-5. Did you mean --algo.critic.optimizer.lr?",
    ],
)
"""Without dashes."""
OTHERS = (
    "grpo --learning_rate 1e-6 --packing_samples --eps_clip_low_high 0.2 0.3 --num_ppo_epochs=4",
    [
        "5 unknown options.",
        "grpo. Did you mean --algo grpo?",
        "--learning_rate 1e-6. Did you mean --algo.actor.optimizer.lr?",
        "--packing_samples. Nothing is padded: leave it out.",
        "--eps_clip_low_high 0.2 0.3. "
        "Type --algo.policy_loss.clip_low LOW --algo.policy_loss.clip_high HIGH.",
        "--num_ppo_epochs=4. Did you mean --algo.epochs?",
    ],
)
"""As for TRL and OpenRLHF, with flags that have no value, and options of several."""


@pytest.mark.parametrize(("typed", "lines"), [VERL, OTHERS], ids=["verl", "others"])
def test_each_option_of_a_recipe_is_answered(typed: str, lines: list[str]) -> None:
    assert told(typed).split("\n  ") == lines


@pytest.mark.parametrize("typed", ["--learning_rate 1e-6", "grpo", "data.train_files=a.parquet"])
def test_a_single_option_is_told_as_ever(typed: str) -> None:
    said = f"unrecognized arguments: {typed}"
    assert told(typed) == option_error(said, OWNERS)


def test_an_error_of_another_kind_is_told_as_ever() -> None:
    refused = "algo: no such class. --a and --b are no options"
    assert option_errors(refused, OWNERS, elsewhere={}) == option_error(refused, OWNERS)
