"""Weights of another model on their way to a generator: refused by name, under the generator's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller import ResourcePool, WorkerError
from rlhf_lightning.controller.call import Call
from rlhf_lightning.controller.device import Device, Placement
from rlhf_lightning.engines import FSDP, FSDPEngine
from rlhf_lightning.parallel import Link, ParallelLayout, World
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.strategies import OpenRLHF
from rlhf_lightning.workers import Actor, Generator, Role, Settings
from tests.unit import spmd
from tests.unit.algos import small

ENDS = (0, 1)
"""Devices of the actor and of the generator."""


def refused(group: dist.ProcessGroup, actor: str, generator: str) -> str:
    """What the generator's device says, while the actor's sends all it has."""
    link = dist.new_group(list(ENDS))
    rank = dist.get_rank(group)
    if rank == 0:
        Link(link, 0, torch.device("cpu")).send(FSDPEngine(ModelSpec(path=actor)).weights())
        return ""
    device = Device(rank)
    device.world = World(rank, torch.device("cpu"), {ENDS: link})
    role = Generator.of(Actor(path=generator))
    device.host("generator", Placement(role, ParallelLayout(), (rank,), Settings(), link=ENDS))
    with pytest.raises(WorkerError) as caught:
        device.call(Call("generator", "receive_weights", 0, 0, (), {}, ()))
    assert not list(Link(link, 0, torch.device("cpu")).receive())  # the actor waits until its end is read
    return str(caught.value)


def test_the_generator_names_the_parameter_and_both_shapes(tmp_path: Path) -> None:
    actor, generator = small.write_model(tmp_path / "actor"), small.write_model(tmp_path / "generator")
    AutoConfig.from_pretrained(generator, intermediate_size=64).save_pretrained(generator)
    said = spmd.run(2, refused, actor, generator)[1]
    assert said.startswith("generator[rank 0, node ")
    what = "model.layers.0.mlp.gate_proj.weight (48, 32) and has (64, 32). Giver and taker must be"
    assert f"].receive_weights: {generator}: was given {what}" in said


def joined(group: dist.ProcessGroup, model: str, train: FSDP) -> Tensor:
    """Weights of an actor that four devices divide, or of the generator on the fifth, as their job starts."""
    strategy, rank = OpenRLHF(settings=Settings(train=train)), group.rank()
    strategy.connect(GRPO(actor=Actor(path=model, init_seed=3)))
    pools = [ResourcePool(name, n, (name,)) for name, n in (("actor", 4), ("generator", 1))]
    placements, groups = strategy.placements(strategy.models(), pools)
    device, name = Device(rank), "actor" if rank < 4 else "generator"
    made = {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(groups)}
    device.world = World(rank, torch.device("cpu"), made)
    device.host(name, placements[name])
    method = "send_weights" if rank < 4 else "receive_weights"
    device.call(Call(name, method, rank % 4, rank, (), {}, ()))
    role = placements[name].role
    assert isinstance(role, Role)
    return role.engine.give_weights()


@pytest.mark.parametrize("train", [FSDP(shard=2), FSDP(tensor=2)], ids=["copies", "tensor"])
def test_an_actor_that_its_devices_divide_has_a_link_as_well(train: FSDP, tmp_path: Path) -> None:
    """Only one of its devices is in the link, so they are in different numbers of groups."""
    *actor, generator = spmd.run(5, joined, small.write_model(tmp_path), train)
    assert all(torch.equal(part, generator) for part in actor)


def sent(group: dist.ProcessGroup, model: str) -> Tensor:
    """Weights of an actor on two devices, or of the generator on the third."""
    pairs: dict[tuple[int, ...], dist.ProcessGroup | None]
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (0, 2))}
    rank = dist.get_rank(group)
    device, actor = Device(rank), Actor(path=model, init_seed=3)
    device.world = World(rank, torch.device("cpu"), pairs)
    name, role, layout, devices = (
        ("actor", actor, ParallelLayout(d=2), (0, 1))
        if rank < 2
        else ("generator", Generator.of(actor.seeded(4)), ParallelLayout(), (2,))
    )
    device.host(name, Placement(role, layout, devices, Settings(), link=(0, 2)))
    device.call(Call(name, "send_weights" if rank < 2 else "receive_weights", rank % 2, rank, (), {}, ()))
    return role.engine.give_weights()


def test_all_devices_of_an_actor_help_to_send(tmp_path: Path) -> None:
    """One sends, but it has a part of the weights only."""
    first, second, generator = spmd.run(3, sent, small.write_model(tmp_path))
    assert torch.equal(first, second)
    assert torch.equal(first, generator)
