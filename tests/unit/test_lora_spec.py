"""Adapters are the same in whatever order their layers are named, and errors name the field they stand in."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.algos import SafeRLHF
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP
from rlhf_lightning.spec import LoRA
from rlhf_lightning.strategies import Colocated, HybridEngine3D
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Cost, Critic, Settings
from tests.unit.algos.short import trainer


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
