"""Adapters are the same in whatever order their layers are named, and errors name the field they stand in."""

from __future__ import annotations

import logging
from dataclasses import field
from pathlib import Path

import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO, PPO, SafeRLHF
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP
from rlhf_lightning.spec import LoRA, OptimizerSpec
from rlhf_lightning.strategies import Colocated, HybridEngine3D
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Cost, Critic, Settings
from tests.unit.algos.short import Started, refusal, trainer


def test_named_layers_have_one_order() -> None:
    one, other = LoRA(target_modules=("v_proj", "q_proj")), LoRA(target_modules=["q_proj", "v_proj"])  # type: ignore[arg-type]
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    ("strategy", "lora", "told"),
    [
        (HybridEngine3D(), LoRA(), " with strategy.settings.engine=megatron: only the FSDP engine"),
        (Colocated(devices=1), LoRA(path="x"), ".path=x: there is no"),
        (
            Colocated(devices=2, settings=Settings(train=FSDP(tensor=2))),
            LoRA(),
            " with strategy.settings.train.tensor=2: layers with adapters are not divided. Try tensor=1, or "
            "leave lora out.",
        ),
    ],
)
def test_errors_name_the_field_of_the_role(strategy: Strategy, lora: LoRA, told: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    algorithm = SafeRLHF(cost=Cost(functions="length"), cost_critic=Critic(lora=lora))
    with pytest.raises(ValueError, match=r".") as error:
        trainer(strategy, tmp_path).fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=4))
    assert str(error.value).startswith(f"cost_critic.lora{told}")


def adapted(lr: float | None = None, *, path: str = "") -> Actor:
    """An actor with adapters, and maybe with a rate."""
    optimizer = OptimizerSpec() if lr is None else OptimizerSpec(lr=lr)
    return Actor(lora=LoRA(path=path), optimizer=optimizer)


class Faster(GRPO):
    """With a default of its own."""

    actor: Actor = field(default_factory=lambda: adapted(1e-5))


@pytest.mark.parametrize(
    ("algorithm", "rates"),
    [
        (GRPO(actor=adapted()), {"actor": "1e-06"}),
        (PPO(actor=adapted(), critic=Critic(lora=LoRA())), {"actor": "1e-06", "critic": "1e-05"}),
        (Faster(), {"actor": "1e-05"}),
        (Faster(actor=adapted()), {"actor": "1e-06"}),
        (GRPO(actor=adapted(1e-5)), {}),
        (GRPO(actor=adapted(1e-4)), {}),
        (GRPO(actor=adapted(path="adapters")), {}),
        (GRPO(), {}),
    ],
    ids=["default", "two roles", "its own default", "below it", "chosen", "as advised", "trained", "whole"],
)
def test_adapters_at_the_rate_of_whole_models_are_told_of(
    algorithm: RLHFAlgorithm, rates: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rlhf_lightning"):
        refusal(algorithm, tmp_path)
    assert [record.getMessage() for record in caplog.records if ".lora" in record.getMessage()] == [
        f"{name}.lora with optimizer.lr={rate}: adapters begin at 0, and hardly move at the rate of whole "
        f"models. Try --algo.{name}.optimizer.lr 1e-4."
        for name, rate in rates.items()
    ]


def test_adapters_that_only_answer_have_no_rate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, algorithm = trainer(Started(), tmp_path, limit_val_batches=1), GRPO(actor=adapted())
    with caplog.at_level(logging.WARNING, "rlhf_lightning"), pytest.raises(RuntimeError, match="started"):
        run.validate(algorithm, datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=2))
    assert "optimizer.lr" not in caplog.text
