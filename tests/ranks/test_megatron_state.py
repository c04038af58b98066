"""What the Megatron engine keeps: checkpoints, exports, weights of others, offloaded parts, its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_lightning.engines import PARTS, Megatron, check_checkpoint
from rlhf_lightning.engines.megatron.engine import MegatronEngine
from rlhf_lightning.engines.megatron.optimizer import ShardedAdamW
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.parallel.layout import Generation
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.workers import Reference
from tests.unit import spmd
from tests.unit.engines import three_d, tiny
from tests.unit.engines.tiny import Fit


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: three_d.write(directory / name, name) for name in ("tied", "qwen")}


@dataclass(frozen=True)
class Job:
    """One engine's life: it loads, steps, saves and exports."""

    layout: ParallelLayout
    steps: int
    load: Path | None = None
    save: Path | None = None
    export: Path | None = None
    distributed_optimizer: bool = False


def lived(group: dist.ProcessGroup, spec: ModelSpec, job: Job) -> tuple[Tensor, Tensor]:
    """Weights as loaded and at the end."""
    config = Megatron(max_tokens_per_micro_batch=20, distributed_optimizer=job.distributed_optimizer)
    engine = three_d.megatron(three_d.seat(group, job.layout), spec, "lm", config)
    replica, d = job.layout.coordinate(group.rank()).d, job.layout.d
    if job.load is not None:
        three_d.step(engine, tiny.rows()[replica::d])
        engine.load(job.load, trained=False)
        alone, optimizer = engine.give_weights(), engine._optimizer
        assert isinstance(optimizer, ShardedAdamW)
        assert optimizer.moment_steps is None
        engine.load(job.load)
        assert torch.equal(alone, engine.give_weights())
        assert engine.version == 3
    loaded = engine.give_weights()
    for _ in range(job.steps):
        three_d.step(engine, tiny.rows()[replica::d])
    if job.save is not None:
        engine.save(job.save)
    if job.export is not None:
        engine.export(job.export)
        assert load_file(job.export / "model.safetensors"), "there for every rank"
    first = group.rank() == 0
    assert len(engine.give_weights(wanted=first)) == (len(loaded) if first else 0)
    return loaded, engine.give_weights()


def run(spec: ModelSpec, job: Job) -> tuple[Tensor, Tensor]:
    """The same on all ranks of a layout, which must agree."""
    results = spmd.run(job.layout.num_ranks, lived, spec, job)
    for loaded, final in results[1:]:
        assert torch.equal(loaded, results[0][0])
        assert torch.equal(final, results[0][1])
    return results[0]


def test_a_checkpoint_continues_in_any_layout_and_engine(models: dict[str, Path], tmp_path: Path) -> None:
    """(2,2,1) -> FSDP -> (1,2,2) with a distributed optimizer -> FSDP, a step each, as if never stopped."""
    plain = tiny.spec(models["tied"])
    spec = replace(plain, optimizer=replace(plain.optimizer, warmup_steps=3))  # rates tell steps apart
    straight = three_d.fsdp(spec, "lm")
    wanted = []
    for _ in range(4):
        three_d.step(straight, tiny.rows())
        wanted.append(straight.give_weights())

    def close(ours: Tensor, step: int) -> None:
        torch.testing.assert_close(ours, wanted[step - 1], rtol=0, atol=1e-4)

    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    first = run(spec, Job(ParallelLayout(2, 2, 1), steps=1, save=one))[1]
    check_checkpoint(spec, "lm", one)
    assert len(list(one.glob("*.safetensors"))) == 4
    fsdp = three_d.fsdp(spec, "lm")
    fsdp.load(one)
    assert torch.equal(fsdp.give_weights(), first)
    three_d.step(fsdp, tiny.rows())
    close(fsdp.give_weights(), 2)
    fsdp.save(two)
    loaded, third = run(
        spec, Job(ParallelLayout(1, 2, 2), steps=1, load=two, save=three, distributed_optimizer=True)
    )
    assert torch.equal(loaded, fsdp.give_weights())
    close(third, 3)
    assert len(list(three.glob("*.safetensors"))) == 2  # one of the two replicas writes
    last = three_d.fsdp(spec, "lm")
    last.load(three)
    assert torch.equal(last.give_weights(), third)
    three_d.step(last, tiny.rows())
    close(last.give_weights(), 4)


def test_a_rank_with_no_part_of_the_moments_saves_and_loads(tmp_path: Path) -> None:
    """Megatron pads a share to 128 / d numbers at least, so a small model leaves nothing to the last."""
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = tiny.config(tie=True)
    config.update({**sizes, "num_key_value_heads": 1, "head_dim": 4})
    spec, layout = tiny.spec(tiny.write_noisy(tmp_path / "model", config)), ParallelLayout(d=5)
    job = Job(layout, steps=1, save=tmp_path / "saved", distributed_optimizer=True)
    saved = run(spec, job)[1]
    loaded = run(spec, replace(job, steps=0, load=job.save, save=None))[0]
    assert torch.equal(loaded, saved)


def test_an_export_is_that_of_the_other_engine(models: dict[str, Path], tmp_path: Path) -> None:
    (models["qwen"] / "tokenizer.json").write_text("{}")
    spec = tiny.spec(models["qwen"], dtype="bfloat16")
    ours, theirs, saved = (tmp_path / name for name in ("ours", "theirs", "saved"))
    weights = run(spec, Job(ParallelLayout(3, 2, 1), steps=1, save=saved, export=ours))[1]
    fsdp = three_d.fsdp(spec, "lm")
    fsdp.load(saved)
    assert torch.equal(fsdp.give_weights(), weights)
    fsdp.export(theirs)
    tensors, others = (load_file(path / "model.safetensors") for path in (ours, theirs))
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    for name in ("config.json", "tokenizer.json"):
        assert (ours / name).read_text() == (theirs / name).read_text()
    assert AutoModelForCausalLM.from_pretrained(ours).dtype == torch.bfloat16


def refused(group: dist.ProcessGroup, spec: ModelSpec, other: Path, empty: Path) -> Tensor:
    """Checkpoints of nothing and of another model, which change nothing; then weights of another model."""
    engine = three_d.megatron(three_d.seat(group, ParallelLayout(t=2)), spec, "lm")
    before = engine.give_weights()
    with pytest.raises(ValueError, match=r"engine.json is missing"):
        engine.load(empty)
    with pytest.raises(ValueError, match=r"is of another model"):
        engine.load(other)
    with pytest.raises(ValueError, match=f"cannot follow a model of {len(before) + 1}"):
        engine.follow_weights(torch.zeros(len(before) + 1), decay=0.5)
    assert torch.equal(engine.give_weights(), before)
    engine.follow_weights(torch.arange(len(before)).float(), decay=0.75)
    torch.testing.assert_close(engine.give_weights(), 0.75 * before + 0.25 * torch.arange(len(before)))
    assert engine.version == 1
    return before


def test_wrong_checkpoints_are_refused_and_other_weights_followed(
    models: dict[str, Path], tmp_path: Path
) -> None:
    three_d.fsdp(tiny.spec(models["tied"]), "lm").save(tmp_path / "other")
    spec = tiny.spec(models["qwen"])
    before = three_d.fsdp(spec, "lm").give_weights()
    for found in spmd.run(2, refused, spec, tmp_path / "other", tmp_path):
        assert torch.equal(found, before)


def rested(group: dist.ProcessGroup, spec: ModelSpec, *, distributed: bool) -> list[Tensor]:
    """Weights of engines that only train, whose parts rest between micro-batches, that generate too."""
    layout = ParallelLayout(t=2, generation=Generation(1, 1))
    seat, found = three_d.seat(group, layout), []
    config = Megatron(max_tokens_per_micro_batch=20, distributed_optimizer=distributed)
    for kind in ("plain", "rests", "generates"):
        engine = three_d.megatron(seat, spec, "lm", config)
        engine._offloaded.frees = True
        for _ in range(2):
            if kind == "generates":
                with engine.generating():
                    pass
                assert engine.transition().received_bytes > 0
            for number, rows in enumerate((tiny.rows()[:3], tiny.rows()[3:])):
                if kind == "rests":
                    away(engine, gradients=number > 0)
                engine.accumulate(rows, Fit(), tiny.counts(), temperature=1.0)
            engine.optimizer_step()
        found.append(engine.give_weights())
    return found


def away(engine: MegatronEngine, *, gradients: bool) -> None:
    """Offload and reload everything; gradients of 0 need no room on the host."""
    before = engine.memory()
    engine.offload(PARTS)
    during = engine.memory()
    assert [during[part] for part in PARTS] == [0, 0, 0]
    assert during["host"] == sum(before.values()) - (0 if gradients else before["gradients"])
    assert engine.reload_bytes() == (sum(before.values()) if engine._offloaded.frees else 0)
    assert {p.untyped_storage().nbytes() for p in engine.shards.values()} == {0}
    uses: tuple[Callable[[], object], ...] = (
        lambda: engine.infer(tiny.rows(), temperature=1.0),
        engine.optimizer_step,
        lambda: engine.save(Path("unused")),
        lambda: engine.load(Path("unused")),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match=r"parameters.* are offloaded"):
            use()
    engine.reload(PARTS)
    assert engine.memory() == before


@pytest.mark.parametrize("distributed", [False, True])
def test_rest_and_generation_change_no_training(models: dict[str, Path], *, distributed: bool) -> None:
    spec = tiny.spec(models["qwen"])
    for plain, rests, generates in spmd.run(2, rested, spec, distributed=distributed):
        assert torch.equal(rests, plain)
        torch.testing.assert_close(generates, plain, rtol=0, atol=1e-5)


def remembered(group: dist.ProcessGroup, spec: ModelSpec) -> tuple[dict[str, int], int]:
    """Bytes after a step, and the numbers that the rank trains."""
    engine = three_d.megatron(three_d.seat(group, ParallelLayout(2, 2, 1)), spec, "lm")
    three_d.step(engine, tiny.rows())
    return engine.memory(), sum(p.numel() for p in engine.shards.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_counts_what_is_there(models: dict[str, Path], dtype: tiny.Dtype) -> None:
    """A copy in float32 is the optimizer's."""
    spec = tiny.spec(models["qwen"], dtype=dtype)
    parameter, kept = (4, 8) if dtype == "float32" else (2, 12)
    for memory, count in spmd.run(4, remembered, spec):
        assert memory == {
            "parameters": parameter * count,
            "gradients": 4 * count,
            "optimizer": kept * count,
            "host": 0,
        }


def followed(group: dist.ProcessGroup, spec: ModelSpec, config: Megatron) -> tuple[dict[str, int], int]:
    """Bytes that a model has which becomes an average of others, and those that come back from the host."""
    engine = three_d.megatron(three_d.seat(group, ParallelLayout(d=2)), spec, "lm", config)
    before, held = engine.give_weights(), engine.memory()
    engine._offloaded.frees = True
    engine.offload(PARTS)
    reloaded = engine.reload_bytes()
    engine.reload(["parameters", "gradients"])
    uses = engine.give_weights, lambda: engine.follow_weights(before, decay=0.5)
    for use in uses:
        with pytest.raises(RuntimeError, match="optimizer are offloaded"):
            use()
    engine.reload(["optimizer"])
    engine.follow_weights(torch.zeros_like(before), decay=0.5)
    torch.testing.assert_close(engine.give_weights(), before / 2)
    assert torch.isfinite(engine.infer(tiny.rows(), temperature=1.0)["log_probs"]).all()
    assert engine.memory() == held
    if not spec.trains:
        with pytest.raises(RuntimeError, match=r"trains=False, so there is no memory for gradients\."):
            engine.accumulate(tiny.rows(), Fit(), tiny.counts(), temperature=1.0)
    return held, reloaded


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_a_model_that_follows_another_has_no_gradients(
    models: dict[str, Path], *, distributed_optimizer: bool
) -> None:
    path, config = str(models["tied"]), Megatron(distributed_optimizer=distributed_optimizer)
    follows = spmd.run(2, followed, Reference(path=path, dtype="bfloat16", decay=0.5), config)
    learns = spmd.run(2, followed, ModelSpec(path=path, dtype="bfloat16"), config)
    for (held, reloaded), (other, _) in zip(follows, learns, strict=True):
        assert other["gradients"] > 0
        assert held == other | {"gradients": 0}
        assert reloaded == held["parameters"] + held["optimizer"] > held["parameters"]
