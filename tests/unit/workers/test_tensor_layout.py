"""Layouts of models whose layers devices share, and what is refused before any process starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GPT2Config

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.engines import FSDP, Megatron, ZeRO
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.spec import LoRA
from rlhf_lightning.strategies import Auto, Colocated, OpenRLHF
from rlhf_lightning.workers import Actor, Generator, Reference, Reward, Settings
from rlhf_lightning.workers.naming import naming_role
from tests.unit.engines import tiny

SETTINGS = Settings(train=FSDP(tensor=2))
OPTION = "strategy.settings.train.tensor=2"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_causal(tmp_path_factory.mktemp("causal")))


def test_models_are_divided_and_what_has_no_layers_or_only_answers_is_not(path: str) -> None:
    actor, strategy = Actor(path=path), OpenRLHF(settings=SETTINGS)
    layout = strategy.layout(actor, "actor", 4)
    assert layout == ParallelLayout(t=2, d=2, generation=Generation())
    assert layout.generating.num_replicas == 4
    actor.check_layout(layout, SETTINGS)
    assert strategy.layout(Reward(path=""), "reward", 3) == ParallelLayout(d=3)
    copy = Generator.of(actor)
    assert strategy.layout(copy, "generator", 3) == ParallelLayout(d=3)
    copy.check_layout(ParallelLayout(d=3), SETTINGS)


def test_a_number_of_devices_that_does_not_divide_is_refused(path: str) -> None:
    for devices, fitting in ((5, 4), (1, 2)):
        message = (
            f"^{OPTION}: 2 does not divide the {devices} devices of actor. Try {fitting} devices for it."
        )
        with pytest.raises(ValueError, match=message):
            Colocated(settings=SETTINGS).layout(Actor(path=path), "actor", devices)
    with pytest.raises(
        ValueError, match=r"^strategy.settings.train.tensor=0: a layer has one device at least"
    ):
        FSDP(tensor=0)


def test_a_model_that_cannot_be_divided_is_refused(path: str, tmp_path: Path) -> None:
    layout = ParallelLayout(t=4, d=1, generation=Generation())
    said = rf"^actor\.path={path}: .*tensor=4 for .*: 4 does not divide the 2 key-value heads. Try 1, 2"
    with pytest.raises(ValueError, match=said), naming_role("actor"):
        Actor(path=path).check_layout(layout, Settings(train=FSDP(tensor=4)))
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'gpt2': transformers has no plan"):
        Actor(path=str(tmp_path)).check_layout(ParallelLayout(t=2), SETTINGS)
    said = rf"^reference\.path={tmp_path}: model_type='gpt2': Megatron takes"
    with pytest.raises(ValueError, match=said), naming_role("reference"):
        Reference(path=str(tmp_path)).check_layout(layout, Settings(engine="megatron"))


def test_adapters_on_divided_layers_are_refused(path: str) -> None:
    said = f"^actor.lora with {OPTION}: layers with adapters are not divided"
    with pytest.raises(ValueError, match=said), naming_role("actor"):
        Actor(path=path, lora=LoRA()).check_layout(ParallelLayout(t=2), SETTINGS)


def test_copies_count_groups_of_tensor_ranks(path: str) -> None:
    settings = Settings(train=FSDP(tensor=2, shard=2))
    Actor(path=path).check_layout(ParallelLayout(t=2, d=4), settings)
    with pytest.raises(ValueError, match=r"^strategy.settings.train.shard=2 on 3 ranks"):
        Actor(path=path).check_layout(ParallelLayout(t=2, d=3), settings)


def test_a_strategy_with_layouts_of_its_own_refuses_it(path: str) -> None:
    layout = Auto(settings=SETTINGS).layout(Actor(path=path), "actor", 2)
    said = f"{OPTION} with train p=1, t=1: the strategy divides the models itself. Try tensor=1 here, or"
    with pytest.raises(ValueError, match=said):
        Actor(path=path).check_layout(layout, SETTINGS)
    Actor(path=path).check_layout(layout, replace(SETTINGS, engine="megatron"))


def test_what_is_never_divided_has_no_groups_of_shards(path: str) -> None:
    """A generator of three devices, beside an actor in two copies of two shards."""
    strategy = OpenRLHF(settings=Settings(train=FSDP(shard=2)))
    strategy.connect(GRPO(actor=Actor(path=path)))
    pools = [ResourcePool(name, n, (name,)) for name, n in (("actor", 4), ("generator", 3))]
    _, groups = strategy.placements(strategy.models(), pools)
    link = (0, 4, 5, 6)
    assert groups == [(0, 1, 2, 3), (0, 2), (1, 3), (0, 1), (2, 3), (4, 5, 6), link, link]


def test_groups_that_a_model_computes_in() -> None:
    whole, divided = ParallelLayout(d=2), ParallelLayout(t=2)
    assert FSDP().groups(whole, (4, 5)) == [(4, 5)]
    assert FSDP().groups(ParallelLayout(), (4,)) == []
    assert {(4, 5), (4,), (5,)} == set(FSDP(tensor=2).groups(divided, (4, 5)))
    assert FSDP(shard=2).groups(ParallelLayout(d=4), (4, 5, 6, 7))[1:] == [(4, 6), (5, 7), (4, 5), (6, 7)]
    assert FSDP(shard=1).groups(ParallelLayout(d=4), (4, 5, 6, 7)) == [(4, 5, 6, 7)]
    assert (4, 5, 6, 7) in FSDP(tensor=2).groups(ParallelLayout(t=2, d=2), (4, 5, 6, 7))
    assert set(Megatron().groups(whole, (4, 5))) == set(ZeRO().groups(whole, (4, 5))) == {(4, 5), (4,), (5,)}
