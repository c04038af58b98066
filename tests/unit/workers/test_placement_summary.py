"""What a run says as it starts: which models are on which devices, and how they are divided."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.algos import GRPO, PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.parallel import Generation
from rlhf_lightning.spec import Dtype
from rlhf_lightning.strategies import Colocated, HybridEngine3D, Local, OneStepOff, Split
from rlhf_lightning.strategies.hybrid3d import Parallel3D, Sizes
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Critic, Reward, Settings
from rlhf_lightning.workers.placement_summary import placement_summary
from tests.unit.algos.short import grpo, trainer
from tests.unit.algos.small import write_model

DIVIDED = Parallel3D(p=2, t=2, generate=Generation(t=2), roles={"critic": Sizes()})


def summary(strategy: Strategy, algorithm: PPO | GRPO, *, gpu: bool, nodes: str = "") -> list[str]:
    strategy.connect(algorithm)
    roles = strategy.models()
    placements, _ = strategy.placements(roles, strategy.place(tuple(roles), strategy.devices))
    return placement_summary(placements, gpu=gpu, nodes=tuple(nodes)).splitlines()


@pytest.mark.parametrize(
    ("strategy", "algorithm", "said"),
    [
        (
            Split(devices=4),
            PPO(),
            [
                "4 CPUs, engine fsdp, generator native, float32",
                "  0-1: actor d2, reference d2",
                "  2-3: critic d2, reward",
            ],
        ),
        (
            HybridEngine3D(devices=8, parallel=DIVIDED),
            PPO(),
            [
                "8 CPUs, engine megatron, generator native, float32",
                "  0-7: actor p2 t2 d2 -> pg1 tg2 dg2, critic d8, reference p2 t2 d2, reward",
            ],
        ),
    ],
    ids=["split", "hybrid3d"],
)
def test_each_pool_is_a_line_with_its_models_and_their_sizes(
    strategy: Strategy, algorithm: PPO | GRPO, said: list[str]
) -> None:
    assert summary(strategy, algorithm, gpu=False) == said


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("aaaa", ["  0-1: actor d2, reference d2", "  2-3: critic d2, reward"]),
        ("aaab", ["  0-1 (a): actor d2, reference d2", "  2-3 (2 a, 3 b): critic d2, reward"]),
    ],
)
def test_of_several_nodes_each_pool_names_its_own(nodes: str, said: list[str]) -> None:
    assert summary(Split(devices=4), PPO(), gpu=False, nodes=nodes)[1:] == said


def test_of_many_nodes_the_first_and_the_last_are_named() -> None:
    found = summary(Colocated(devices=12), GRPO(), gpu=False, nodes="aabbccddeeff")[1]
    assert found == "  0-11 (0-1 a, 2-3 b, 4-5 c, .., 10-11 f): actor d12, reference d12, reward"


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("aaabbbbb", ["  tensor groups on several nodes, over their network: actor, reference"]),
        ("aabbbbcc", []),
        ("aaaaaaaa", []),
    ],
)
def test_models_whose_layers_are_divided_over_nodes_are_named(nodes: str, said: list[str]) -> None:
    assert summary(HybridEngine3D(devices=8, parallel=DIVIDED), PPO(), gpu=True, nodes=nodes)[2:] == said


def test_one_device_and_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_lightning.workers.settings.require_vllm", lambda: None)
    strategy = Colocated(devices=1, settings=Settings(generator="vllm"))
    said = ["1 GPU, engine fsdp, generator vllm, float32", "  0: actor d1, reference d1, reward"]
    assert summary(strategy, GRPO(), gpu=True) == said


def test_a_run_says_where_its_models_stand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch"):
        trainer(Local(), tmp_path).fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))
    assert "engine fsdp, generator native, float32\n  0: actor d1, " in caplog.text


@pytest.mark.parametrize(
    ("types", "computes", "slow"),
    [
        (
            {},
            "float32",
            "actor, critic, reference, reward (--algo.actor.dtype bfloat16, --algo.reward.dtype bfloat16)",
        ),
        ({"actor": "bfloat16"}, "bfloat16 and float32", "reward (--algo.reward.dtype bfloat16)"),
        ({"actor": "bfloat16", "reward": "bfloat16"}, "bfloat16", ""),
        ({"actor": "float32", "reward": "float32"}, "float32", ""),
    ],
    ids=["default", "actor", "bfloat16", "asked for"],
)
def test_models_that_compute_in_float32_unasked_are_named_on_gpus(
    types: dict[str, Dtype], computes: str, slow: str, tmp_path: Path
) -> None:
    paths = {name: write_model(tmp_path / name) for name in ("actor", "reward")}
    algorithm = PPO(
        actor=Actor(path=paths["actor"], dtype=types.get("actor")),
        reward=Reward(path=paths["reward"], dtype=types.get("reward")),
    )
    first, _, *last = summary(Colocated(devices=2), algorithm, gpu=True)
    assert first == f"2 GPUs, engine fsdp, generator native, {computes}"
    expected = [f"  float32 on GPUs, many times slower than bfloat16: {slow}"] if slow else []
    assert [line for line in last if "fresh" not in line] == expected
    assert len(summary(Colocated(devices=2), algorithm, gpu=False)[2:]) == 1


def test_models_without_weights_are_named(tmp_path: Path) -> None:
    algorithm = PPO(actor=Actor(path=write_model(tmp_path)), critic=Critic(path="embedded"))
    found = summary(OneStepOff(devices=4), algorithm, gpu=False)
    assert "  3: generator d1" in found, "whose weights are the actor's"
    assert found[-1] == "  fresh weights, as their directories hold a config.json alone: actor, reference"
