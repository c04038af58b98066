"""Plans on the real simulators: exact, consistent, quick, and clear about what is impossible."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser

from rlhf_lightning.algos import PPO
from rlhf_lightning.commands import map as command
from rlhf_lightning.mapping import hardware, memory, shapes, simulate
from rlhf_lightning.mapping.auto_parallel import AutoParallel
from rlhf_lightning.mapping.dataflow import Dataflow, Stage, Work
from rlhf_lightning.mapping.partitions import pool_sizes
from rlhf_lightning.mapping.plan import plan, smallest_cluster
from rlhf_lightning.mapping.search import DeviceKind, Search
from rlhf_lightning.mapping.simulated import WAVES, SimulatedCosts
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.mapping_inputs import read_dataflow
from rlhf_lightning.parallel.layout import Generation, ParallelLayout
from rlhf_lightning.strategies import Auto
from rlhf_lightning.workers import Actor
from tests.unit.mapping.simulated import ROLES, SEVEN, costs_of, flow_of, random_case

ASKED = ("--algo", "grpo", "--devices", "16", "--model", "llama-7b", "--reward", "none")


def test_with_offload_a_model_brings_all_that_it_is() -> None:
    """What devices do: the model before leaves whole, and the next comes with masters and moments."""
    layout = next(a for a in costs_of().layouts("actor", 8) if (a.p, a.t, a.d) == (1, 2, 4))
    stays, leaves = costs_of(), costs_of(offload=True)
    for role in ROLES:
        at = layout if role == "actor" else replace(layout, generation=None)
        assert (stays.resident(role, at) > 0, leaves.resident(role, at)) == (True, 0)
        assert stays.working(role, at) > 0
        assert leaves.working(role, at) == pytest.approx(stays.resident(role, at) + stays.working(role, at))
    (generate,) = stays.work("actor")[0]
    alone = stays.capacity - stays.resident("actor", layout)
    assert leaves.kv_bytes("actor", layout, generate, leaves.capacity) == pytest.approx(
        stays.kv_bytes("actor", layout, generate, alone)
    )
    for free in (leaves.capacity, 50e9):
        used = leaves.used("actor", layout, generate, free)
        assert stays.resident("actor", layout) < used <= free


def test_more_memory_never_takes_longer() -> None:
    """The bounds of the search rest on it; it does not hold of lengths with a long tail."""
    cases = [*(random_case(seed) for seed in range(20)), (costs_of(), 6)]
    for number, (costs, devices) in enumerate(cases):
        (work,) = costs.work("actor")[0]
        for layout in costs.layouts("actor", devices):
            buffers, needed = costs._room("actor", layout, work)
            slowest = math.inf
            for wave in reversed(WAVES):
                (seconds, *_) = costs.seconds("actor", layout, buffers + needed * (1 + 1e-6) / wave)
                assert seconds <= slowest * (1 + 1e-9), (number, layout, wave)
                slowest = seconds


def test_an_actor_takes_the_transition_the_generation_and_the_updates() -> None:
    costs = costs_of()
    layout = ParallelLayout(t=2, d=3, generation=Generation(t=1))
    (work,) = costs.work("actor")[0]
    moved = simulate.transition(costs.hardware, SEVEN, layout, Workload()).seconds
    generation, preparation, training = costs.seconds("actor", layout, 50e9)
    assert moved > 0.5
    assert generation == pytest.approx(moved + costs.estimate("actor", layout, work, 50e9).seconds)
    assert preparation == 0
    assert training == simulate.train(costs.hardware, SEVEN, layout, Workload(mini_batches=8)).seconds


def test_a_model_needs_what_its_largest_work_takes() -> None:
    costs, layout = costs_of(), ParallelLayout(t=2, d=3)
    shape = SEVEN.with_head("scalar")
    critic = memory.training(shape, layout, Workload(mini_batches=8))
    reference = memory.inference(SEVEN, layout, Workload())
    needed = [costs.resident(r, layout) + costs.working(r, layout) for r in ("critic", "reference")]
    assert needed == pytest.approx([critic.total, reference.total])
    scoring = costs.used("critic", layout, costs.work("critic")[1][0], 0.0)
    resting = critic.total - critic.activations
    assert scoring == pytest.approx(resting + memory.inference(shape, layout, Workload()).activations)


def test_generations_of_other_numbers_of_rows_are_other_work() -> None:
    """Six replicas, each of which decodes at most 256 rows at once."""
    works = [Work("actor", "generate", 6 * rows, 1) for rows in (1, 256, 512)]
    flow = Dataflow(tuple(Stage(str(work.rows), (work,)) for work in works))
    costs = SimulatedCosts(hardware.A100, flow, {"actor": SEVEN}, workload=Workload())
    layout = ParallelLayout(t=2, d=3, generation=Generation(t=1))
    row = (256 + 1024) * 2 * 2 * 32 * 4096
    found = [costs.kv_bytes("actor", layout, work, 1e15) for work in works]
    assert found == pytest.approx([row, 256 * row, 256 * row])
    _, wave, waves = (costs.estimate("actor", layout, work, 1e15).seconds - 0.01 for work in works)
    assert waves == pytest.approx(2 * wave)


def test_models_of_one_shape_cost_the_same_if_they_do_the_same() -> None:
    models = dict.fromkeys(ROLES, SEVEN)
    few, many = (
        SimulatedCosts(hardware.A100, flow_of(64, updates=n), models, workload=Workload()) for n in (4, 8)
    )
    assert few.signature("reference") == many.signature("reward")
    assert few.signature("critic") != many.signature("critic")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    command.run(arguments)
    return capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(
        run(
            capsys,
            "--algo",
            "ppo",
            "--devices",
            "32",
            "--model",
            "llama-7b",
            "--critic",
            "llama-13b",
            "--json",
        )
    )
    assert list(found) == [
        *("mapping", "iteration_s", "tokens_per_s", "stages_s", "memory_gb", "search_s", "baselines")
    ]
    assert found["iteration_s"] == pytest.approx(sum(found["stages_s"].values()))
    assert found["tokens_per_s"] == pytest.approx(1024 * 2048 / found["iteration_s"])
    assert set(found["baselines"]) == {"colocated", "split", "standalone"}
    assert max(found["baselines"].values()) <= found["tokens_per_s"] * (1 + 1e-9)
    assert sorted(role for pool in found["mapping"] for role in pool["roles"]) == sorted(ROLES)
    assert sum(pool["devices"] for pool in found["mapping"]) <= 32
    for pool, used in zip(found["mapping"], found["memory_gb"], strict=True):
        assert max(used.values()) <= 80
        for phases in pool["layouts"].values():
            for layout in phases.values():
                assert layout["p"] * layout["t"] * layout["d"] == pool["devices"]
    generation = next(p["layouts"]["actor"]["generation"] for p in found["mapping"] if "actor" in p["roles"])
    assert generation["p"] % generation["pg"] == generation["t"] % generation["tg"] == 0


def test_a_baseline_that_cannot_fit_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--algo", "ppo", "--devices", "8", "--model", "llama-13b", "--json"))
    assert found["baselines"]["colocated"] == pytest.approx(found["tokens_per_s"])
    assert found["baselines"]["standalone"] is None


def test_a_reward_of_functions_works_where_a_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--algo", "grpo", "--devices", "8", "--model", "llama-7b", "--reward", "llama-7b", "--top", "1")
    layouts = [pool["layouts"] for pool in json.loads(run(capsys, *asked, "--json"))["mapping"]]
    assert [list(at["reward"]) for at in layouts if "reward" in at] == [["preparation"]]


def test_text_yaml_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = ("--yaml", str(tmp_path / "run.yaml"), "--picture", str(tmp_path / "run.svg"))
    text = run(capsys, *ASKED, "--top", "2", *files)
    assert text.count("s an iteration") == 2
    assert "does not fit" not in text
    assert text.count("strategy:") == 1
    assert "    --pick 2 shows and writes the configuration of #2, and so on\n" in text
    picture, layout = (tmp_path / "run.svg").read_text(), r"p\d+ t\d+ d\d+"
    assert picture.count("<path") > 10
    drawn = set(re.findall(layout, picture))  # in comments
    assert drawn
    assert drawn <= set(re.findall(layout, text))
    written = (tmp_path / "run.yaml").read_text()
    first, paths, workload, updates, *_ = written.splitlines()
    assert first == f"# rlhf fit -c {tmp_path / 'run.yaml'} --data ..."
    assert paths == "# Replace llama-7b, a size only, by a model: its directory or hub name."
    assert workload.startswith("# Predicted for --data.batch_size 1024 --data.max_prompt_tokens 1024 ")
    assert updates == "# in 8 updates of 1024 rows (--algo.mini_batch_size)"  # of groups of 8 answers
    config = yaml.safe_load(written)
    assert config["algo"]["init_args"]["actor"]["dtype"] == "bfloat16"
    parser = ArgumentParser()
    parser.add_class_arguments(Auto, "strategy")
    given = parser.parse_object({"strategy": config["strategy"]["init_args"]})
    strategy = parser.instantiate_classes(given)["strategy"]
    assert strategy.settings.engine == "megatron"
    assert strategy.settings.megatron.max_tokens_per_micro_batch == Workload().micro_batch_tokens
    assert 0 < strategy.settings.generate.slots < 256  # which would not have room
    placed = strategy.place(("actor", "reference", "reward"), 16)
    assert sorted(r for pool in placed for r in pool.roles) == ["actor", "reference", "reward"]
    assert sum(pool.num_devices for pool in placed) == strategy.devices
    best = json.loads(run(capsys, *ASKED, "--json"))["mapping"]
    for pool in placed:
        layouts = next(found["layouts"] for found in best if set(found["roles"]) <= set(pool.roles))
        for name, found in layouts.items():
            layout = strategy.layout(PPO().roles()[name], name, pool.num_devices)
            sizes = next(iter(found.values()))
            assert (layout.p, layout.t, layout.d) == (sizes["p"], sizes["t"], sizes["d"])
    actor = strategy.layout(Actor(), "actor", 16).generating
    generation = next(found["layouts"]["actor"]["generation"] for found in best if "actor" in found["roles"])
    assert (actor.p, actor.t) == (generation["pg"], generation["tg"])


def test_a_config_is_written_as_the_directory_that_a_run_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text((Path(command.__file__).parents[1] / "embedded" / "config.json").read_text())
    run(capsys, "--algo", "sft", "--devices", "1", "--model", str(config), "--yaml", str(tmp_path / "y"))
    assert "# Replace" not in (tmp_path / "y").read_text()
    written = yaml.safe_load((tmp_path / "y").read_text())
    assert written["algo"]["init_args"]["actor"]["path"] == str(tmp_path)


def test_another_than_the_best_is_picked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "run.yaml"
    command.run((*ASKED, "--top", "1", "--pick", "2", "--yaml", str(written)))
    text, said = capsys.readouterr()
    assert said == f"rlhf: wrote {written}, #2; its first lines say how to run it.\n"
    assert text.index("#2 ") < text.index("strategy:")
    pools = yaml.safe_load(written.read_text())["strategy"]["init_args"]["mapping"]["pools"]
    chosen = json.loads(run(capsys, *ASKED, "--pick", "2", "--json"))
    assert [pool["devices"] for pool in pools] == [found["devices"] for found in chosen["mapping"]]
    assert chosen["tokens_per_s"] < json.loads(run(capsys, *ASKED, "--json"))["tokens_per_s"]
    assert "--pick" not in run(capsys, *ASKED, "--top", "1")  # there is no other
    with pytest.raises(ValueError, match=r"--pick 9: there are only \d mappings. Try --pick \d"):
        run(capsys, *ASKED, "--pick", "9")


def test_too_large_says_how_much_is_missing_and_what_would_do() -> None:
    models = {role: shapes.load("llama-70b") for role in ROLES}
    costs = SimulatedCosts(hardware.A100, flow_of(1024), models, workload=Workload())
    with pytest.raises(ValueError, match=r"do not fit on 8 x a100-80gb.* GB a\s+device") as err:
        plan(costs, 8)
    missing = float(re.findall(r"that ([\d.]+) GB", str(err.value))[0])
    weights = (18 + 18 + 2 + 2) * models["actor"].num_parameters / 8 / 1e9
    assert missing == pytest.approx(weights - costs.capacity / 1e9, rel=0.2)
    (in_all,) = re.findall(r"\(([\d,]+) GB in all\)", str(err.value))
    assert float(in_all.replace(",", "")) == pytest.approx(8 * missing, abs=1)
    enough = smallest_cluster(costs)
    assert enough is not None
    assert str(err.value).endswith(f"has {enough}.")
    assert plan(costs, enough, count=1).mappings
    with pytest.raises(ValueError, match="do not fit"):
        plan(costs, pool_sizes(enough - 1, 8)[-1], count=1)


def test_what_is_missing_is_that_of_a_size_that_was_searched() -> None:
    models = {role: shapes.load("llama-70b") for role in ROLES}
    costs = SimulatedCosts(hardware.A100, flow_of(1024), models, workload=Workload())
    vast = SimulatedCosts(
        replace(hardware.A100, memory_bytes=1e30), flow_of(1024), models, workload=Workload()
    )
    needed = AutoParallel(vast).min_bytes(ROLES, 8) / 1e9
    with pytest.raises(ValueError, match=rf"on 12 x .* at least {needed:.1f} GB on each"):
        plan(costs, 12, sizes=(1, 2, 4, 8))


def test_models_that_fit_without_room_for_keys_and_values() -> None:
    """A million rows at once, of which a 256th is 4,096."""
    flow = Dataflow((Stage("generation", (Work("actor", "generate", 1 << 20, 1),)),))
    cramped = replace(hardware.A100, memory_bytes=17e9)
    costs = SimulatedCosts(cramped, flow, {"actor": SEVEN}, workload=Workload(max_resident=0))
    with pytest.raises(ValueError, match=r"do not fit on 1 x .* no room for keys and values.* smaller batch"):
        plan(costs, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--devices", "7"), r"7 devices are neither.*t up to 8.*Try --devices 4 or 8; .* has 4"),
        (("--devices", "12"), "Try --devices 8 or 16"),
        (("--devices", "0"), "0 is not a whole number from 1 up"),
        (("--devices", "4104"), "4,104 devices: the search goes up to 4,096. Ask for fewer"),
        (("--hardware", "a100-80gb:4096,h100-80gb:8"), "4,104 devices: the search goes up to 4,096"),
        (("--devices", "8", "--picture", "x.pgf"), r"--picture x\.pgf: .* Try x\.png or \.svg"),
        (("--devices", "8", "--picture", "x"), r"--picture x: .* Try x\.png or \.svg"),
        (("--devices", "8", "--hardware", "a100"), "one of a100-80gb, "),
        (("--devices", "8", "--critic", "llama-8b"), "one of llama-7b, "),
        (("--devices", "8", "--cost", "llama-7b"), "--cost llama-7b: unknown.*ppo has --critic, --reference"),
    ],
)
def test_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        command.run(("--algo", "ppo", "--model", "llama-7b", *arguments))


class Asked(SimulatedCosts):
    """Counts how often it is asked for seconds."""

    times = 0

    def seconds(self, role: str, layout: ParallelLayout, free: float) -> Sequence[float]:
        self.times += 1
        return super().seconds(role, layout, free)


def test_layouts_of_two_models_that_generate_are_not_tried_in_pairs() -> None:
    """The generation layouts of each are chosen by themselves: costs were asked for with each pair, twice."""
    writing = [Stage(f"generation {role}", (Work(role, "generate", 512, 1),)) for role in ("actor", "judge")]
    flow = Dataflow(
        (*writing, Stage("training", (Work("actor", "train", 512, 8), Work("judge", "train", 512, 4))))
    )
    costs = Asked(hardware.A100, flow, dict.fromkeys(flow.roles, SEVEN), workload=Workload())
    pairs = math.prod(len(costs.layouts(role, 32)) for role in flow.roles)
    assert Search([DeviceKind(costs, 32, (32,))], flow.roles).best()
    assert costs.times < pairs / 2


def test_four_70b_models_on_128_gpus_in_seconds() -> None:
    models = {role: shapes.load("llama-70b") for role in ROLES}
    costs = SimulatedCosts(hardware.A100, read_dataflow(PPO(), 1024), models, workload=Workload())
    started = time.process_time()
    assert plan(costs, 128).mappings
    assert time.process_time() - started < 10


def test_batches_smaller_than_the_usual_number_of_updates(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(
        capsys, "--algo", "ppo", "--model", "llama-7b", "--devices", "8", "--batch", "4", "--updates", "1"
    )
    assert "actor" in said
