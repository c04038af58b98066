"""What an engine on DeepSpeed holds and gives: memory, whole weights, answers, checkpoints, exports."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_lightning.algos import PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import PARTS, Head, NativeGenerator, TrainEngine, Transition, checkpoint
from rlhf_lightning.engines.choice import train_engine
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.spec import ModelSpec, OptimizerSpec, Sampling
from rlhf_lightning.workers import Actor, Critic, Reference, Reward, Settings
from tests.extras import zero
from tests.unit import spmd
from tests.unit.algos import small
from tests.unit.engines import tiny

STAGES = (1, 2, 3)
HELD = {1: (1, 1, 3 / 2), 2: (1, 1 / 2, 3 / 2), 3: (1 / 2, 1 / 2, 3 / 2)}
"""Shares of the model that each of two ranks holds: parameters, gradients, and the optimizer's masters
and moments; in stage 2 both hold the gradient of a parameter on the border."""


def answers(engine: TrainEngine) -> Tensor:
    """Greedy responses [6, 5] to all prompts."""
    rows = tiny.rows().select("prompt_ids", "prompt_mask")
    rows["row_ids"] = torch.arange(len(rows))
    greedy = Sampling(max_new_tokens=5, temperature=0.0)
    with engine.generating() as decoder:
        generator = NativeGenerator(decoder, device="cpu", ends=Ends(pad_token_id=0, eos_token_ids=(3,)))
        return torch.as_tensor(generator.generate(rows, sampling=greedy, seed=0)["response_ids"])


@dataclass
class Said:
    """Of one rank and stage."""

    answers: list[Tensor]
    """Before and after a step."""
    transition: Transition
    held: list[dict[str, int]]
    """Memory before and after generation, and with a gradient."""
    whole: dict[str, Tensor]
    weights: Tensor


def said(group: dist.ProcessGroup, spec: ModelSpec, bucket: int) -> list[Said]:
    found = []
    for stage in STAGES:
        engine = zero.zero(group, spec, stage, bucket_numbers=bucket)
        held = [engine.memory()]
        first = answers(engine)
        held.append(engine.memory())
        zero.step(engine, zero.own(group))
        later, last = answers(engine), engine.transition()
        stepped = engine.memory()
        engine.infer(zero.own(group), temperature=0.7)
        assert engine.memory() == stepped  # no layer stays gathered for a backward pass
        zero.step_into(engine, zero.own(group))
        held.append(engine.memory())
        whole = {name: weight.clone() for name, weight in engine.weights()}
        found.append(Said([first, later], last, held, whole, engine.give_weights()))
    return found


def test_it_holds_a_share_and_answers_with_the_whole_model(paths: dict[str, Path]) -> None:
    spec = tiny.spec(paths["tied"])
    one = zero.fsdp(spec)
    wanted = [answers(one)]
    zero.step(one, tiny.rows())
    wanted.append(answers(one))
    whole = dict(one.weights())
    size = 4 * len(one.give_weights())
    ranks = spmd.run(2, said, spec, 6000)
    for stages in ranks:
        for stage, ours in zip(STAGES, stages, strict=True):
            assert torch.equal(ours.answers[0], wanted[0])
            assert torch.equal(ours.answers[1], wanted[1])
            assert ours.held[0] == ours.held[1]
            for part, share in zip(PARTS, HELD[stage], strict=True):
                assert ours.held[2][part] == pytest.approx(share * size, rel=0.25), (stage, part)
            assert ours.whole.keys() == whole.keys()
            for name, weight in whole.items():
                torch.testing.assert_close(ours.whole[name], weight, rtol=0, atol=1e-4)
            flat = torch.cat([weight.flatten() for weight in ours.whole.values()])
            torch.testing.assert_close(flat, ours.weights, rtol=0, atol=0)
    for first, second, third in ranks:
        for same in (first.transition, second.transition):
            assert (same.received_bytes, same.generation_bytes) == (0, same.training_bytes)
            assert same.training_bytes == pytest.approx(size, rel=0.01)
        moved = third.transition
        assert moved.seconds > 0
        assert moved.received_bytes == pytest.approx(size / 2, rel=0.01)
        assert moved.training_bytes == pytest.approx(size / 2, rel=0.01)
        assert moved.generation_bytes == moved.training_bytes + size


def scored(group: dist.ProcessGroup, spec: ModelSpec) -> list[tuple[Tensor, dict[str, int]]]:
    """By stage: what a model says, and what it holds."""
    seat = zero.seat(group)
    engines = [train_engine(spec, head="lm", seat=seat, config=zero.settings(stage)) for stage in STAGES]
    rows = zero.own(group)
    return [(engine.infer(rows, temperature=0.7)["log_probs"], engine.memory()) for engine in engines]


def test_a_model_that_nothing_trains_has_parameters_alone(paths: dict[str, Path]) -> None:
    path = str(paths["tied"])
    size = 2 * len(zero.fsdp(ModelSpec(path=path)).give_weights())
    frozen = spmd.run(2, scored, Reference(path=path, dtype="bfloat16"))
    trained = spmd.run(2, scored, ModelSpec(path=path, dtype="bfloat16"))
    for mine, theirs in zip(frozen, trained, strict=True):
        for share, (said, held), (expected, other) in zip((1, 1, 0.5), mine, theirs, strict=True):
            torch.testing.assert_close(said, expected, rtol=0, atol=0)
            assert held["parameters"] == pytest.approx(share * size, rel=0.02)
            assert held["gradients"] == held["optimizer"] == 0
            assert other["optimizer"] == pytest.approx(size, rel=0.02)  # masters, before a step


def judged(group: dist.ProcessGroup, spec: ModelSpec, head: Head) -> list[Tensor]:
    """By stage, what a model with a head says of this rank's rows."""
    seat, rows = zero.seat(group), zero.own(group)
    engines = [train_engine(spec, head=head, seat=seat, config=zero.settings(stage)) for stage in STAGES]
    return [engine.infer(rows, temperature=1.0)["values"] for engine in engines]


def test_a_judge_that_nothing_trains_has_its_head(paths: dict[str, Path]) -> None:
    frozen = spmd.run(2, judged, Reference(path=str(paths["scalar"])), "reward")
    trained = spmd.run(2, judged, ModelSpec(path=str(paths["scalar"])), "reward")
    for mine, theirs in zip(frozen, trained, strict=True):
        for said, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(said, expected, rtol=0, atol=1e-6)


def saved(group: dist.ProcessGroup, spec: ModelSpec, stage: int, directory: Path) -> tuple[Tensor, Tensor]:
    """Two steps, a checkpoint, and a third: the weights saved, and those in the end."""
    engine = zero.zero(group, spec, stage)
    for _ in range(2):
        zero.step(engine, zero.own(group))
    engine.save(directory)
    before = engine.give_weights()
    zero.step(engine, zero.own(group))
    return before, engine.give_weights()


def loaded(
    group: dist.ProcessGroup, spec: ModelSpec, stages: tuple[int, ...], directory: Path
) -> list[tuple[Tensor, Tensor, dict[str, float]]]:
    """Weights as read, those after another step, and its report; engines that have stepped before, too."""
    found = []
    for stage in stages:
        engine = zero.zero(group, spec, stage)
        zero.step(engine, zero.own(group))
        engine.load(directory, trained=False)
        alone, moments = engine.give_weights(), engine._masters.moment_steps
        assert torch.equal(torch.cat([weight.flatten() for _, weight in engine.weights()]), alone)
        engine.load(directory)
        read = engine.give_weights()
        assert torch.equal(alone, read)
        assert moments is None
        assert engine.version == 3
        report = zero.step(engine, zero.own(group))
        found.append((read, engine.give_weights(), report))
    return found


SCHEDULED = OptimizerSpec(lr=1e-3, weight_decay=0.1, warmup_steps=5)


@pytest.mark.parametrize(("stage", "others"), [(2, (3,)), (3, (1, 2))])
def test_a_checkpoint_continues_under_every_stage_and_fsdp(
    paths: dict[str, Path],
    tmp_path: Path,
    stage: int,
    others: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 100_000)
    spec = ModelSpec(path=str(paths["tied"]), optimizer=SCHEDULED)
    before, after = spmd.run(2, saved, spec, stage, tmp_path)[0]
    assert len(list(tmp_path.glob("shard-00002-*.safetensors"))) > 1
    one = zero.fsdp(spec)
    one.load(tmp_path)
    assert torch.equal(one.give_weights(), before)
    report = zero.step(one, tiny.rows())
    assert report["lr"] == pytest.approx(1e-3 * 3 / 6)
    torch.testing.assert_close(one.give_weights(), after, rtol=0, atol=1e-5)
    one.save(tmp_path)
    zero.step(one, tiny.rows())
    for found in spmd.run(2, loaded, spec, others, tmp_path):
        for read, later, theirs in found:
            torch.testing.assert_close(read, after, rtol=0, atol=1e-5)
            torch.testing.assert_close(later, one.give_weights(), rtol=0, atol=1e-5)
            assert theirs["lr"] == pytest.approx(1e-3 * 4 / 6)


def in_bfloat16(group: dist.ProcessGroup, spec: ModelSpec, other: str, directory: Path) -> list[bool]:
    """A checkpoint without a step, one of another model, a model that follows, and what is offloaded."""
    engine = zero.zero(group, spec, 3, whole_below=200)  # norms are whole, the rest is divided
    engine.save(directory / "fresh")
    started = engine.give_weights()
    zero.step(engine, zero.own(group))
    learned = engine.give_weights()
    engine.follow_weights(torch.zeros_like(learned), decay=0.25)
    followed = engine.version == 2 and torch.equal(engine.give_weights(), 0.25 * learned)
    with engine.gathered() as module:
        computes = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    followed = followed and torch.equal(computes, (0.25 * learned).bfloat16())
    engine.load(directory / "fresh")
    reset = torch.equal(engine.give_weights(), started) and engine._masters.moment_steps is None
    engine.export(directory / "exported")
    with pytest.raises(ValueError, match="cannot follow a model of 3"):
        engine.follow_weights(torch.zeros(3), decay=0.5)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        engine.load(directory / "nowhere")
    with pytest.raises(ValueError, match="is of another model"):
        zero.zero(group, ModelSpec(path=other), 2).load(directory / "fresh")
    engine.offload(["optimizer"])
    for act in (engine.save, engine.load):
        with pytest.raises(RuntimeError, match=": optimizer are offloaded"):
            act(directory / "nowhere")
    with pytest.raises(RuntimeError, match=": optimizer are offloaded"):
        engine.follow_weights(learned, decay=0.5)
    away = r": optimizer are offloaded. Call reload\(\['optimizer'\]\) first"
    for call in (engine.give_weights, engine.optimizer_step):
        with pytest.raises(RuntimeError, match=away):
            call()
    host = engine.memory()
    moved = host["optimizer"] == 0 and host["host"] > 0 and engine.reload_bytes() == 0
    engine.reload(["optimizer"])
    engine._offloaded.frees = True
    before = engine.memory()
    engine.offload(PARTS)
    moved = moved and engine.reload_bytes() == sum(before.values())
    for ask in (engine.weights, engine.gathered, lambda: engine.infer(zero.own(group), temperature=1.0)):
        with pytest.raises(RuntimeError, match=": parameters are offloaded"):
            ask()
    with pytest.raises(RuntimeError, match=": parameters, gradients are offloaded"):
        zero.step(engine, zero.own(group))
    engine.reload(PARTS)
    moved = moved and engine.reload_bytes() == 0 and engine.memory() == before
    return [followed, reset, moved, zero.step(engine, zero.own(group))["skipped_steps"] == 0]


def test_it_follows_resets_exports_and_refuses(paths: dict[str, Path], tmp_path: Path) -> None:
    spec = tiny.spec(paths["lm"], dtype="bfloat16")
    assert spmd.run(2, in_bfloat16, spec, str(paths["wide"]), tmp_path) == [[True] * 4] * 2
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    theirs = AutoModelForCausalLM.from_pretrained(paths["lm"], dtype=torch.bfloat16)
    assert ours.dtype == torch.bfloat16
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight)


def test_ppo_runs_in_this_process_as_on_fsdp(tmp_path: Path) -> None:
    path = small.write_model(tmp_path)
    found = []
    for settings in (Settings(), Settings(engine="zero", zero=zero.settings(3))):
        optimizer = OptimizerSpec(lr=1e-3)
        algorithm = PPO(
            actor=Actor(path=path, optimizer=optimizer, sampling=Sampling(max_new_tokens=6)),
            critic=Critic(optimizer=optimizer),
            reward=Reward(functions="length"),
        )
        data = TaskData(num_rows=8, num_val_rows=0, batch_size=4)
        found.append(small.run(algorithm, data, settings=settings))
    plain, ours = found
    assert not dist.is_initialized()
    for _ in range(2):  # trainers are circles, and hold the process group; then what they held
        gc.collect()
    for wanted, numbers in zip(plain.numbers, ours.numbers, strict=True):
        names = [name for name in wanted if name.startswith(("actor/", "critic/", "reward/"))]
        assert names
        assert {name: numbers[name] for name in names} == pytest.approx(
            {name: wanted[name] for name in names}, rel=1e-3, abs=1e-5
        )
    for role, weights in plain.weights.items():
        for name, weight in weights.items():
            torch.testing.assert_close(ours.weights[role][name], weight, rtol=0, atol=1e-4)
