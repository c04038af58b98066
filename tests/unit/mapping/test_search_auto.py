"""`--strategy auto` places what the search finds, or what it is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import DAPO, DPO, GRPO, KTO, PPO, SFT, RewardModel
from rlhf_lightning.controller import Batch, Metrics, cluster
from rlhf_lightning.data import CompletionData, PreferenceData, PromptData, TaskData, UnpairedData
from rlhf_lightning.engines import FSDP, Megatron, Native
from rlhf_lightning.mapping import hardware, report, shapes
from rlhf_lightning.mapping.dataflow import Dataflow, Stage, Work
from rlhf_lightning.mapping.plan import Plan, plan
from rlhf_lightning.mapping.report import Request, table
from rlhf_lightning.mapping.search import DeviceMapping, Pool
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.trace import trace
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.mapping_inputs import read_recipes, read_workload
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.strategies import Auto, auto
from rlhf_lightning.strategies.auto import MappingOption, PoolOption, RoleSizes
from rlhf_lightning.workers import Actor, Critic, Settings
from tests.conftest import ROOT
from tests.unit.mapping.simulated import ROLES

ONE = ParallelLayout()


def attached(strategy: Auto, algorithm: RLHFAlgorithm) -> Auto:
    """The strategy as it is when a trainer sets it up."""
    trainer = Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False)
    strategy.connect(algorithm)
    algorithm.trainer = trainer
    trainer.datamodule = data = TaskData(batch_size=64, num_rows=128)  # type: ignore[attr-defined]
    data.trainer = trainer
    data.setup("fit")
    return strategy


def test_it_places_what_the_search_finds(caplog: pytest.LogCaptureFixture) -> None:
    strategy = attached(Auto(devices=3), PPO(mini_batch_size=16, critic_warmup_steps=5))
    found = strategy.plan(3)
    best = found.mappings[0]
    assert {(w.role, w.calls) for w in found.costs.dataflow.stages[-1].work} == {("critic", 4), ("actor", 4)}
    assert all(layout.p == layout.t == 1 for m in found.mappings for p in m.pools for layout in p.layouts)
    assert found.costs.only_replicas
    assert not attached(Auto(settings=Settings(engine="megatron")), PPO()).plan(3).costs.only_replicas
    assert found.costs.workload.batch == 64
    pools = strategy.place(ROLES, 3)
    assert [pool.num_devices for pool in pools] == [pool.devices for pool in best.pools]
    placed = [set(pool.roles) - {"reward"} for pool in pools]
    assert placed == [set(pool.roles) for pool in best.pools]
    assert "reward" in pools[0].roles
    assert "\n".join(table(found, best, 1)) in caplog.text


def test_the_actor_generates_as_the_search_has_it() -> None:
    layouts = (ParallelLayout(2, 4, 1, generation=Generation(1, 2)), ParallelLayout(2, 2, 2))
    pool = Pool(("actor", "critic"), 8, layouts, seconds=(1.0,))
    assert auto._sizes(DeviceMapping((pool,))) == {
        "actor": RoleSizes(p=2, t=4, generate=Generation(1, 2)),
        "critic": RoleSizes(p=2, t=2),
    }


@pytest.mark.parametrize(("memory_mb", "wanted", "slots"), [(1000, 0, 0), (1000, 300, 300), (200, 0, 293)])
def test_an_actor_decodes_as_many_rows_at_once_as_have_room(
    tmp_path: Path, memory_mb: int, wanted: int, slots: int
) -> None:
    """512 rows of 13 + 128 tokens take 222 MB; the search counts them in waves where they have no room."""
    hardware.save(replace(hardware.CPU, memory_bytes=memory_mb * 1e6), tmp_path / "machine.yaml")
    strategy = attached(
        Auto(
            devices=1,
            settings=Settings(generate=Native(slots=wanted)),
            mapping=MappingOption(hardware=str(tmp_path / "machine.yaml")),
        ),
        DAPO(),
    )
    placed, _ = strategy.placements(strategy.models(), strategy._pools(strategy.models()))
    settings = placed["actor"].settings
    assert isinstance(settings, Settings)
    assert settings.generate.slots == slots
    assert strategy.settings_of("actor") == settings, "which is what predictions of the run read"
    text = report.as_yaml(plan := strategy.plan(1), plan.mappings[0], Request("dapo", {}, "auto"))
    assert (f"generate: {{slots: {slots}}}" in text) == (slots > 0)


def two_writers() -> Plan:
    """Two models that generate alike in one stage, and a third that does not, on two devices."""
    models = dict.fromkeys(("actor", "judge", "reference"), shapes.load("llama-7b"))
    writing = Stage("generation", tuple(Work(role, "generate", 512, 1) for role in ("actor", "judge")))
    flow = Dataflow((writing, Stage("preparation", (Work("reference", "infer", 512, 1),))))
    return plan(SimulatedCosts(hardware.A100, flow, models, workload=Workload(batch=512)), 2)


def test_two_that_generate_alike_cost_the_same() -> None:
    costs = two_writers().costs
    assert costs.signature("actor") == costs.signature("judge")
    assert costs.seconds("actor", ONE, 20e9) == costs.seconds("judge", ONE, 20e9)


def test_one_number_of_rows_at_once_is_written_for_all_that_generate() -> None:
    """That of the pool with the least room: a generator that is told a number does not look at its memory."""
    found = two_writers()
    pools = (
        Pool(("actor",), 1, (ONE,), seconds=(1.0, 0.0)),
        Pool(("judge", "reference"), 1, (ONE, ONE), seconds=(1.0, 1.0)),
    )
    rows = {task.role: task.rows_at_once for pool in pools for task in found.tasks(pool) if task.rows_at_once}
    assert 0 < rows["judge"] < rows["actor"] < 512
    asked = Request("own", dict.fromkeys(found.costs.shapes, ""), "auto")
    assert f"generate: {{slots: {rows['judge']}}}" in report.as_yaml(found, DeviceMapping(pools), asked)


def test_any_number_of_devices_is_shared_out() -> None:
    """Seven GPUs of a node of eight, though no pools of 1, 2 or 4 tile it."""
    strategy = attached(Auto(devices=7, mapping=MappingOption(hardware="a100-80gb")), PPO())
    assert sum(pool.num_devices for pool in strategy.place(ROLES, 7)) == 7


def test_without_a_number_there_is_a_device_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "usable_cores", lambda: 3)
    assert sum(pool.num_devices for pool in attached(Auto(), PPO()).place(ROLES, None)) == 3


@pytest.mark.parametrize(("devices", "sizes"), [(12, {1, 2, 4, 8, 12}), (24, {1, 2, 4, 8, 16, 24})])
def test_no_pool_within_several_nodes_lies_in_two(devices: int, sizes: set[int]) -> None:
    """Nodes of eight; all devices together are one pool too, where the last node is not full."""
    strategy = attached(Auto(mapping=MappingOption(hardware="a100-80gb")), PPO())
    found = {pool.devices for mapping in strategy.plan(devices).mappings for pool in mapping.pools}
    assert devices in found
    assert found <= sizes


def test_slow_links_pull_the_models_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    sets = []
    for bandwidth in (1e12, 1e5):
        file = tmp_path_factory.mktemp("hardware") / "machine.yaml"
        cluster = replace(hardware.CPU, intra_bandwidth=bandwidth, gpus_per_node=3, intra_latency=1e-6)
        hardware.save(cluster, file)
        strategy = attached(
            Auto(devices=3, mapping=MappingOption(hardware=str(file))), PPO(mini_batch_size=16)
        )
        sets.append(strategy.place(ROLES, 3))
    assert [len(pools) for pools in sets] == [1, 3]
    assert all("reward" in pools[0].roles for pools in sets), "which has no model"
    assert all(sorted(role for pool in pools for role in pool.roles) == sorted(ROLES) for pools in sets)


def test_a_cluster_whose_gpus_this_process_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "num_gpus", lambda: 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"mapping.hardware: the cluster has 16 GPUs.*a100-80gb"):
        attached(Auto(), PPO()).place(ROLES, 16)


@pytest.mark.parametrize(("gpus", "leaves"), [(0, False), (1, True)])
def test_offload_makes_room_on_gpus_only(*, gpus: int, leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "num_gpus", lambda: gpus)
    strategy = attached(Auto(offload=True, mapping=MappingOption(hardware="a100-80gb")), PPO())
    assert strategy.plan(2).costs.workload.offload is leaves


def test_a_model_without_an_actor_is_placed() -> None:
    (pool,) = attached(Auto(), RewardModel()).place(("reward",), 2)
    assert (pool.roles, pool.num_devices) == (("reward",), 2)


def test_unknown_hardware() -> None:
    with pytest.raises(ValueError, match="one of a100-80gb"):
        attached(Auto(mapping=MappingOption(hardware="tpu")), PPO()).place(ROLES, 2)


def test_a_path_that_is_a_size_alone_is_named_with_its_role() -> None:
    """As `rlhf map` writes them."""
    with pytest.raises(ValueError, match=r"^critic\.path=llama-7b: no such directory"):
        attached(Auto(), PPO(critic=Critic(path="llama-7b"))).place(ROLES, 2)


def test_the_form_of_pools_is_in_documents_and_errors() -> None:
    algorithm, broken = GRPO(), Batch.of({"prompt_ids": torch.ones(2, 2)})
    with pytest.raises(ValueError, match=r"GRPO: its dataflow is read .* that failed: ") as refused:
        trace(algorithm, broken)
    documents = [(ROOT / f"docs/{page}.md").read_text() for page in ("mapping", "own_models")]
    for text in (*documents, str(refused.value).replace("devices: N", "devices: 1")):
        (written,) = re.findall(r"--strategy\.mapping\.pools\s+'([^']*)'", text)
        pools = [PoolOption(**{**pool, "roles": tuple(pool["roles"])}) for pool in yaml.safe_load(written)]
        assert all(pool.devices and "actor" in pools[0].roles for pool in pools)


def test_given_pools() -> None:
    pools = (
        PoolOption(roles=("actor", "reward"), devices=2),
        PoolOption(roles=("critic", "reference"), devices=1),
        PoolOption(roles=(), devices=1),
    )
    strategy = Auto(mapping=MappingOption(pools=pools))
    for devices in (None, 4):
        assert [(p.num_devices, p.roles) for p in strategy.place(ROLES, devices)] == [
            (2, ("actor", "reward")),
            (1, ("critic", "reference")),
        ]


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ([("actor", 1)], "lacks critic"),
        (
            [("actor", 1), ("critik", 1)],
            "has no critik that a step would call. It has actor, critic. Leave critik out.$",
        ),
        (
            [("actor critic cost", 1)],
            "has no cost that a step would call. It has actor, critic. Leave cost out.$",
        ),
        (
            [("actor critic reference", 1)],
            r"\. Leave reference out \(where coefficients such as policy_loss\.kl_",
        ),
        ([("actor critic", 1), ("critic", 1)], "critic stand in two"),
        ([("actor", 2), ("critic", 1)], r"devices=2.*these are 3. Try devices=3"),
        ([("actor", 1), ("critic", 0)], "at least 1"),
        ([("actor", 2), ("critic", 0)], "critic has no devices. Give each pool at least 1"),
    ],
)
def test_given_pools_are_checked(pools: list[tuple[str, int]], says: str) -> None:
    option = MappingOption(pools=tuple(PoolOption(roles=tuple(r.split()), devices=n) for r, n in pools))
    with pytest.raises(ValueError, match=says):
        Auto(mapping=option).place(("actor", "critic"), 2)


def test_megatron_is_divided_as_the_search_says(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    cramped = replace(hardware.CPU, memory_bytes=90e6, gpus_per_node=4, intra_bandwidth=1e12)
    hardware.save(cramped, file)
    settings = Settings(engine="megatron")
    strategy = attached(
        Auto(devices=4, mapping=MappingOption(hardware=str(file)), settings=settings), PPO(mini_batch_size=16)
    )
    pools = {role: pool.num_devices for pool in strategy.place(ROLES, 4) for role in pool.roles}
    found = {role: at for pool in strategy.plan(4).mappings[0].pools for role, at in pool.at.items()}
    assert any(layout.p * layout.t > 1 for layout in found.values())
    roles = strategy.algorithm.roles()
    for name, layout in found.items():
        placed = strategy.layout(roles[name], name, pools[name])
        assert (placed.p, placed.t, placed.d) == (layout.p, layout.t, layout.d)
        roles[name].following(roles["actor"]).check_layout(placed, settings)
    assert strategy.layout(roles["reward"], "reward", 2) == ParallelLayout(d=2)


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        (Settings(train=FSDP(shard=4)), 6),
        (Settings(train=FSDP(kept_tokens=64)), 3),
        (Settings(engine="megatron", megatron=Megatron(chunks=2)), 4),
    ],
)
def test_what_the_search_finds_is_taken_by_the_options(settings: Settings, devices: int) -> None:
    """Pools of 1 or 4 where 4 ranks divide a copy, and of 1 where whole weights keep passes."""
    strategy = attached(
        Auto(devices=devices, mapping=MappingOption(hardware="a100-80gb"), settings=settings), PPO()
    )
    for mapping in strategy.plan(devices).mappings:
        for pool in mapping.pools:
            for name, layout in pool.at.items():
                role = strategy.algorithm.roles()[name]
                role.following(strategy.algorithm.main_model).check_layout(layout, settings)


SIZES = {"actor": RoleSizes(p=1, t=2, generate=Generation(1, 2))}


def test_given_sizes() -> None:
    pools = (PoolOption(roles=ROLES, devices=4, sizes=SIZES),)
    strategy = Auto(mapping=MappingOption(pools=pools), settings=Settings(engine="megatron"))
    strategy.place(ROLES, None)
    found = strategy.layout(Actor(), "actor", 4)
    assert found == ParallelLayout(1, 2, 2, generation=Generation(1, 2))
    assert strategy.layout(PPO().critic, "critic", 4) == ParallelLayout(d=4)
    with pytest.raises(ValueError, match=r"actor has p=1 x t=2 = 2 ranks.*does not divide 3.*Try devices=2"):
        strategy.layout(Actor(), "actor", 3)


def test_sizes_that_cannot_be() -> None:
    strategy = Auto(mapping=MappingOption(pools=(PoolOption(roles=ROLES, devices=2, sizes=SIZES),)))
    strategy.place(ROLES, None)
    with pytest.raises(
        ValueError, match=r"engine=fsdp takes replicas only here. Add --strategy.settings.engine megatron"
    ):
        strategy.layout(Actor(), "actor", 2)
    pools = (PoolOption(roles=ROLES, devices=2, sizes={"cost": RoleSizes(t=2)}),)
    with pytest.raises(ValueError, match=r"sizes of cost.*no pool has such a role"):
        Auto(mapping=MappingOption(pools=pools)).place(ROLES, None)


def test_another_algorithm_is_searched_anew() -> None:
    strategy = attached(Auto(devices=3), PPO(mini_batch_size=16))
    first = strategy.plan(3)
    assert strategy.plan(3) is first
    other = PPO(mini_batch_size=64)
    other.trainer = strategy.algorithm.trainer
    strategy.connect(other)
    second = strategy.plan(3)
    assert second is not first
    assert second.costs.dataflow != first.costs.dataflow


class Hinted(GRPO):
    """Reads a field of the rows."""

    def step(self, batch: Batch) -> Metrics:
        assert {cast(dict[str, str], row)["hint"] for row in batch.objects("rows")} == {"x"}
        return super().step(batch)


class Started(Auto):
    """Fails once it is to start."""

    def setup(self, trainer: Trainer) -> None:
        raise RuntimeError("started")


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_a_run_has_its_data_before_its_places_are_found(run: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "what", "answer": "a", "hint": "x"}\n' * 6)
    strategy = Started(devices=2)
    trainer = Trainer(strategy=strategy, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    data = PromptData(path=str(file), val_rows=2, batch_size=4)
    with pytest.raises(RuntimeError, match="started"):
        getattr(trainer, run)(Hinted(group_size=2), datamodule=data)
    (key,) = strategy._found
    workload = cast(tuple[int, Workload], key)[1]
    assert (workload.batch, workload.prompt, workload.real_prompt) == (4, 4, 4.0)


def test_room_is_counted_for_held_out_prompts_too(tmp_path: Path) -> None:
    """A validation draws with as many rows at once, of prompts of 40 tokens instead of 4."""
    file, strategy = tmp_path / "rows.jsonl", attached(Auto(devices=1), GRPO())
    file.write_text("".join(json.dumps({"prompt": "a" * n, "answer": "b"}) + "\n" for n in (4, 4, 4, 40)))
    trainer = strategy.algorithm.trainer
    trainer.datamodule = data = PromptData(path=str(file), val_rows=1, batch_size=2)  # type: ignore[attr-defined]
    data.trainer = trainer
    workload = strategy.plan(1).costs.workload
    assert (workload.prompt, workload.real_prompt) == (40, 4.0)


@pytest.mark.parametrize("algorithm", [DPO(), RewardModel(), KTO(), SFT()])
def test_given_answers_have_the_lengths_of_the_data(algorithm: RLHFAlgorithm, tmp_path: Path) -> None:
    """Bytes are tokens, and an end token follows; an actor that reads alone has no number of new tokens."""
    file, row = tmp_path / "rows.jsonl", {"prompt": "what", "rejected": "b"}
    answers = [{"chosen": "a" * n, "response": "a" * n, "label": n % 2 == 0} for n in range(1, 201)]
    file.write_text("".join(json.dumps(row | answer) + "\n" for answer in answers))
    pairs = algorithm.needs_pairs
    strategy = attached(Auto(), algorithm)
    kind = PreferenceData if pairs else UnpairedData if isinstance(algorithm, KTO) else CompletionData
    algorithm.trainer.datamodule = data = kind(path=str(file), batch_size=8)  # type: ignore[attr-defined]
    data.trainer = algorithm.trainer
    found = read_workload(algorithm, strategy.settings, offload=False)
    assert (found.batch, found.prompt, found.response) == (16 if pairs else 8, 4, 201)
    assert len(found.lengths) <= 64
    assert found.row_tokens == pytest.approx(4 + (51.75 if pairs else 101.5), abs=3)
    for own in read_recipes(algorithm, strategy.settings, found, Dataflow(())).values():
        assert own.row_tokens == found.row_tokens, "which its seconds and bytes are predicted for"
