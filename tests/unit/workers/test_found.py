"""Functions that a node lacks are told as the roles are built there."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.controller import Worker
from rlhf_lightning.controller.device import Device, Placement
from rlhf_lightning.parallel import ParallelLayout, World
from rlhf_lightning.rewards import Environment, HTTPOptions
from rlhf_lightning.workers import Actor, Cost, Generator, Reward, Settings


def worker(rank: int, layout: ParallelLayout) -> Worker:
    return Worker(rank, layout, torch.device("cpu"), None, None, settings=Settings())


@pytest.mark.parametrize("kind", [Reward, Cost])
@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ("no_such_module.function", r"judge function 'no_such_module.function': there is no module .*"),
        ("http://127.0.0.1:1/", r"http://127.0.0.1:1/: the header Key takes the .* NO_SUCH_VARIABLE, .*"),
    ],
)
def test_what_a_node_lacks_of_functions_is_told_before_the_model_is_loaded(
    kind: type[Reward | Cost], functions: str, said: str
) -> None:
    """The controller, which has tried them, may be on another node, and in another environment."""
    role = kind(functions=functions, http=HTTPOptions(headers={"Key": "$NO_SUCH_VARIABLE"}), path="there")
    wanted = rf"^judge\[rank 0, .*\.build: {said} The controller has found it: each node needs it"
    device = Device(0, gpu=False)
    device.world = World(0, torch.device("cpu"), {(0,): None})
    with pytest.raises(RuntimeError, match=wanted):
        device.host("judge", Placement(role, ParallelLayout(), (0,), Settings()))


def test_functions_are_found_where_they_are_asked() -> None:
    """Not on the other ranks of a replica."""
    role, shards = Reward(functions="no_such_module.function"), ParallelLayout(t=2)
    role.build(worker(1, shards))
    with pytest.raises(ValueError, match="no_such_module"):
        role.build(worker(0, shards))


@pytest.mark.parametrize("copy", [False, True])
def test_an_environment_that_a_node_lacks_is_told_before_the_model_is_loaded(*, copy: bool) -> None:
    actor = Actor(path="there", environment=Environment(function="no_such_module.speaks"))
    role = Generator.of(actor) if copy else actor
    with pytest.raises(ValueError, match=r"no module 'no_such_module'.* The controller has found it: each"):
        role.build(worker(0, ParallelLayout()))
