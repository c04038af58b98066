"""The 3D-HybridEngine learns what one device learns, and holds and moves what its plan says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from ray.cluster_utils import Cluster

from rlhf_lightning.algos import PPO
from rlhf_lightning.engines import FSDPEngine, Transition
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.strategies import Auto, Colocated, HybridEngine3D, NeMoAligner
from rlhf_lightning.strategies.auto import MappingOption, PoolOption, RoleSizes
from rlhf_lightning.strategies.hybrid3d import Parallel3D, Sizes
from rlhf_lightning.workers import Reward, Settings
from tests.ray.cluster import NODE
from tests.ray.model import STEPS, Parameters, fit, furthest, ppo


@pytest.fixture(scope="module")
def eight(nodes: Cluster) -> Iterator[None]:
    """A node with a device for each rank of (2, 2, 2)."""
    node = nodes.add_node(**NODE, num_cpus=8)
    yield
    nodes.remove_node(node)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Reward:
    """A reward model, which stages and shards divide as they do the actor, and a function beside it."""
    directory = tmp_path_factory.mktemp("judge")
    FSDPEngine(ModelSpec(path=str(tiny), init_seed=1), head="reward").export(directory)
    return Reward(path=str(directory), functions={"length": 10.0})


def judged(tiny: Path, judge: Reward) -> PPO:
    """PPO that learns from what the model says too."""
    algorithm = ppo(tiny)
    algorithm.reward = judge
    return algorithm


@pytest.fixture(scope="module")
def one(cluster: str, tiny: Path, judge: Reward, tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    """What one device learns."""
    return fit(judged(tiny, judge), Colocated(devices=1), tmp_path_factory.mktemp("one"), steps=STEPS)


@pytest.fixture
def algorithm(tiny: Path, judge: Reward) -> PPO:
    """What learns elsewhere."""
    return judged(tiny, judge)


class Watch(Callback):
    """Keeps what the last transition took on each rank."""

    def __init__(self) -> None:
        self.found: list[Transition] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: object) -> None:
        assert isinstance(pl_module, PPO)
        self.found = pl_module.actor.transition().fetch()


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("train", "generate"),
    [((2, 2, 1), (1, 2)), ((2, 2, 2), (1, 1))],
    ids=lambda sizes: "".join(map(str, sizes)),
)
def test_parameters_are_those_of_one_device(
    one: Parameters, algorithm: PPO, train: tuple[int, int, int], generate: tuple[int, int], tmp_path: Path
) -> None:
    p, t, d = train
    watch = Watch()
    strategy = HybridEngine3D(
        parallel=Parallel3D(p=p, t=t, generate=Generation(*generate)), devices=p * t * d
    )
    learned = fit(algorithm, strategy, tmp_path, steps=STEPS, callbacks=[watch])
    assert furthest(one, learned) < 1e-4
    layout = ParallelLayout(p, t, d, generation=Generation(*generate))
    assert len(watch.found) == layout.num_ranks
    assert all(found.received_bytes > 0 for found in watch.found)
    assert all(found.generation_bytes > found.training_bytes for found in watch.found)


@pytest.mark.usefixtures("eight")
def test_each_role_has_sizes_of_its_own_and_the_actor_another_rule(
    one: Parameters, algorithm: PPO, tmp_path: Path
) -> None:
    roles = {"critic": Sizes(p=2), "reference": Sizes(), "reward": Sizes(p=2)}
    sizes = Parallel3D(t=2, generate=Generation(1, 1, "vanilla"), roles=roles)
    strategy = HybridEngine3D(parallel=sizes, devices=2, offload=True)
    assert furthest(one, fit(algorithm, strategy, tmp_path, steps=STEPS)) < 1e-4


def test_two_sides_that_generate_as_they_train(one: Parameters, algorithm: PPO, tmp_path: Path) -> None:
    watch, strategy = Watch(), NeMoAligner(parallel=Sizes(t=2))
    learned = fit(algorithm, strategy, tmp_path, steps=STEPS, callbacks=[watch])
    assert furthest(one, learned) < 1e-4
    assert [found.received_bytes for found in watch.found] == [0, 0]


def test_a_mapping_runs_in_its_layouts(one: Parameters, algorithm: PPO, tmp_path: Path) -> None:
    watch = Watch()
    pools = (
        PoolOption(roles=("actor", "reward"), devices=2, sizes={"actor": RoleSizes(t=2)}),
        PoolOption(roles=("critic", "reference"), devices=2, sizes={"critic": RoleSizes(p=2)}),
    )
    strategy = Auto(mapping=MappingOption(pools=pools), settings=Settings(engine="megatron"))
    learned = fit(algorithm, strategy, tmp_path, steps=STEPS, callbacks=[watch])
    assert furthest(one, learned) < 1e-4
    assert len(watch.found) == 2
    assert all(found.received_bytes > 0 for found in watch.found)
