"""What the engine keeps: checkpoints, exports, offloaded parts."""

from __future__ import annotations

import copy
import json
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_lightning.engines import FSDP, PARTS, FSDPEngine, Head, checkpoint
from rlhf_lightning.engines.head import Asked
from rlhf_lightning.engines.offload import Part
from rlhf_lightning.spec import ModelSpec
from tests.embedded_model import build_byte_tokenizer
from tests.unit import spmd
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Fit, flat, step


def two_saved_one(group: dist.ProcessGroup, spec: ModelSpec, directory: Path) -> tuple[Tensor, Tensor]:
    """Weights where the checkpoint was written, and a step later."""
    engine = FSDPEngine(spec, group=group)
    step(engine, group)
    step(engine, group)
    engine.save(directory)
    saved = flat(engine)
    step(engine, group)
    return saved, flat(engine)


def loaded_one(group: dist.ProcessGroup | None, spec: ModelSpec, directory: Path) -> tuple[Tensor, Tensor]:
    """Weights as read, and a step later."""
    engine = FSDPEngine(spec, group=group)
    engine.load(directory)
    read = flat(engine)
    step(engine, group)
    return read, flat(engine)


def test_a_checkpoint_of_two_ranks_continues_on_one_two_and_four(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    spec, directory = tiny.spec(paths["lm"]), tmp_path / "checkpoint"
    saved, later = spmd.run(2, two_saved_one, spec, directory)[0]
    assert not torch.equal(saved, later)
    read, continued = spmd.run(2, loaded_one, spec, directory)[0]
    assert torch.equal(read, saved)
    assert torch.equal(continued, later)
    for read, continued in (loaded_one(None, spec, directory), *spmd.run(4, loaded_one, spec, directory)):
        assert torch.equal(read, saved)
        torch.testing.assert_close(continued, later, rtol=0, atol=1e-5)


def two_of_three(group: dist.ProcessGroup, spec: ModelSpec, directory: Path) -> tuple[Tensor, ...]:
    """The same of ranks 1 and 2, while rank 0 does nothing."""
    pair = dist.new_group([1, 2])
    if group.rank() == 0:
        return ()
    return *two_saved_one(pair, spec, directory), *loaded_one(pair, spec, directory)


def test_a_model_on_some_of_the_devices_keeps_to_itself(paths: dict[str, Path], tmp_path: Path) -> None:
    spec = tiny.spec(paths["lm"])
    saved, later = spmd.run(2, two_saved_one, spec, tmp_path)[0]
    for found in spmd.run(3, two_of_three, spec, tmp_path)[1:]:
        for one, other in zip(found, (saved, later) * 2, strict=True):
            assert torch.equal(one, other)


def test_a_checkpoint_holds_safetensors_and_json_and_nothing_is_unpickled(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny.spec(paths["scalar"])
    engine = FSDPEngine(spec, head="scalar")
    step(engine)
    engine.save(tmp_path / "checkpoint")
    assert {file.suffix for file in (tmp_path / "checkpoint").iterdir()} == {".safetensors", ".json"}

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was unpickled")

    fresh = FSDPEngine(spec, head="scalar")
    for module, names in ((pickle, ("load", "loads", "Unpickler")), (torch, ("load",))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    fresh.load(tmp_path / "checkpoint")
    assert torch.equal(flat(fresh), flat(engine))
    assert step(fresh) == step(engine)
    assert torch.equal(flat(fresh), flat(engine))


def test_a_checkpoint_without_a_step_loads_where_steps_were_made(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    fresh, used = FSDPEngine(tiny.spec(paths["lm"])), FSDPEngine(tiny.spec(paths["lm"]))
    fresh.save(tmp_path)
    step(used)
    used.load(tmp_path)
    assert torch.equal(flat(used), flat(fresh))
    assert step(used) == step(fresh)
    assert torch.equal(flat(used), flat(fresh))


def test_a_checkpoint_of_several_files_is_read_whole(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 100_000)
    saved, later = spmd.run(2, two_saved_one, tiny.spec(paths["lm"]), tmp_path)[0]
    for rank in (1, 2):  # as many files as the rank's own shards fill, not as the whole model would
        sizes = [file.stat().st_size for file in tmp_path.glob(f"shard-0000{rank}-model-*.safetensors")]
        assert 3 < len(sizes) <= sum(sizes) / 100_000 + 1
    read, continued = loaded_one(None, tiny.spec(paths["lm"]), tmp_path)
    assert torch.equal(read, saved)
    torch.testing.assert_close(continued, later, rtol=0, atol=1e-5)


def test_a_checkpoint_replaces_one_of_more_ranks(paths: dict[str, Path], tmp_path: Path) -> None:
    spec = tiny.spec(paths["lm"])
    spmd.run(2, two_saved_one, spec, tmp_path)
    engine = FSDPEngine(spec)
    step(engine)
    engine.save(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert torch.equal(loaded_one(None, spec, tmp_path)[0], flat(engine))


def late(own: Callable[..., None]) -> Callable[..., None]:
    """What one rank does for all, and later."""

    def later(*given: object) -> None:
        time.sleep(0.3)
        own(*given)

    return later


def saved_late(group: dist.ProcessGroup, spec: ModelSpec, directory: Path) -> list[list[str]]:
    """What is there for a rank that has saved, in both ways, where the first begins and ends later."""
    checkpoint._begin, checkpoint._end = late(checkpoint._begin), late(checkpoint._end)
    rank, wait, engine = group.rank(), partial(dist.barrier, group), FSDPEngine(spec, group=group)
    part = {f"of {rank}": torch.zeros(1)}
    ways: dict[str, Callable[[Path], None]] = {
        "sharded": engine.save,
        "gathered": lambda path: checkpoint.save_gathered(path, [part], {}, shapes={}, rank=rank, wait=wait),
    }
    found = []
    for way, save in ways.items():
        save(directory / way)
        found.append(sorted(file.name[:11] for file in (directory / way).iterdir()))
    return found


def test_ranks_write_and_go_on_only_when_the_first_has_begun_and_ended(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    for way in ("sharded", "gathered"):
        (tmp_path / way).mkdir()
        (tmp_path / way / "shard-00003-model-00001.safetensors").touch()
    files = ["engine.json", "shard-00001", "shard-00002"]
    assert spmd.run(2, saved_late, tiny.spec(paths["lm"]), tmp_path) == [[files, files]] * 2


def test_wrong_checkpoints_are_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    engine = FSDPEngine(tiny.spec(paths["lm"]))
    step(engine)
    before = flat(engine)
    with pytest.raises(ValueError, match=r"holds no checkpoint, engine.json is missing"):
        engine.load(tmp_path)
    FSDPEngine(tiny.spec(paths["wide"])).save(tmp_path)
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight has shape \[96, 64\] here and \[128, 64\]"):
        engine.load(tmp_path)
    shapes = {f"model.{name}": list(p.shape) for name, p in engine._weights.masters.items()}
    for state, message in ((7, "does not describe"), ({"shapes": shapes}, "moment_steps is missing")):
        (tmp_path / "engine.json").write_text(json.dumps(state))
        with pytest.raises(ValueError, match=message):
            engine.load(tmp_path)
    engine.save(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(RuntimeError, match="Missing key"):  # not torch's CheckpointException, no `Exception`
        engine.load(tmp_path)
    assert torch.equal(flat(engine), before)
    assert engine.memory()["optimizer"] > 0


@pytest.mark.parametrize(
    ("head", "model", "world"),
    [("lm", "lm", 1), ("lm", "tied", 2), ("scalar", "scalar", 1), ("scalar", "scalar", 2)],
)
def test_an_export_computes_the_same_in_plain_transformers(
    paths: dict[str, Path], tmp_path: Path, head: Head, model: str, world: int
) -> None:
    build_byte_tokenizer().save_pretrained(paths[model])
    spec, out = tiny.spec(paths[model]), tmp_path / "export"
    if world == 1:
        expected = exported(None, spec, head, out)
    else:
        expected = spmd.run(world, exported, spec, head, out)[0]
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    loaded = kind.from_pretrained(out)
    assert (out / "tokenizer.json").exists()
    found = torch.cat([p.flatten() for p in loaded.parameters()])
    assert torch.equal(found, expected)
    logits = loaded.base_model(input_ids=torch.arange(5)[None]).last_hidden_state
    again = tiny.expect(out, head=head)
    rows = FSDPEngine(ModelSpec(path=str(out)), head=head).infer(
        tiny.rows(), temperature=1.0, asked=Asked(entropy=True)
    )
    assert logits.isfinite().all()
    for name, values in again.outputs.items():
        torch.testing.assert_close(rows[name], values, atol=1e-5, rtol=1e-5)


def exported(group: dist.ProcessGroup | None, spec: ModelSpec, head: Head, directory: Path) -> Tensor:
    """A step, then an export; the weights."""
    engine = FSDPEngine(spec, head=head, group=group)
    step(engine, group)
    engine.export(directory)
    return flat(engine)


@pytest.mark.filterwarnings("error:torch.distributed is disabled")
def test_weights_come_without_the_optimizer(paths: dict[str, Path], tmp_path: Path) -> None:
    engine, fresh = (FSDPEngine(tiny.spec(paths["lm"])) for _ in range(2))
    step(engine, None)
    engine.save(tmp_path)
    fresh.load(tmp_path, trained=False)
    assert torch.equal(flat(fresh), flat(engine))
    assert fresh.memory()["optimizer"] == 0
    step(engine, None)
    assert not torch.equal(flat(fresh), flat(engine))


def rested(group: dist.ProcessGroup | None, spec: ModelSpec, *, frees: bool) -> tuple[Tensor, Tensor]:
    """Weights after two steps, without and with every part away in between."""
    found = []
    for rests in (False, True):
        engine = FSDPEngine(spec, group=group, config=FSDP(max_tokens_per_micro_batch=20))
        engine._offloaded.frees = frees
        step(engine, group)
        if rests:
            away(engine)
        rows = tiny.rows()
        engine.accumulate(rows, Fit(), tiny.counts(), temperature=1.0)
        if rests:
            away(engine)
        engine.optimizer_step()
        found.append(flat(engine))
    return found[0], found[1]


def away(engine: FSDPEngine) -> None:
    """Offload and reload everything, checking what is counted and refused meanwhile."""
    before = engine.memory()
    engine.offload(PARTS)
    engine.offload(["optimizer"])
    during = engine.memory()
    assert [during[part] for part in PARTS] == [0, 0, 0]
    assert during["host"] == sum(before[part] for part in PARTS) > 0
    assert engine.reload_bytes() == (during["host"] if engine._offloaded.frees else 0)
    if engine._offloaded.frees:
        local = next(iter(engine._weights.masters.values())).detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        assert local.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match=r"parameters are offloaded. Call reload\(\['parameters'\]\)"):
        engine.infer(tiny.rows(), temperature=1.0)
    with pytest.raises(RuntimeError, match="parameters, gradients, optimizer are offloaded"):
        engine.optimizer_step()
    with pytest.raises(RuntimeError, match="parameters, gradients are offloaded"):
        engine.accumulate(tiny.rows(), Fit(), tiny.counts(), temperature=1.0)
    uses: tuple[Callable[[], object], ...] = (
        *(engine.weights, engine.gathered, engine.give_weights),
        lambda: engine.take_weights([]),
        lambda: engine.follow_weights(torch.zeros(0), decay=0.5),
        lambda: engine.export_adapters(Path("nowhere")),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match="parameters are offloaded"):
            use()
    for act in (engine.save, engine.load):
        with pytest.raises(RuntimeError, match="parameters, optimizer are offloaded"):
            act(Path("nowhere"))
    engine.reload(PARTS)
    assert engine.reload_bytes() == 0
    assert engine.memory() == before


@pytest.mark.parametrize(
    ("world", "frees", "dtype"),
    [(1, False, "float32"), (1, True, "float32"), (1, True, "bfloat16"), (2, True, "bfloat16")],
)
def test_training_continues_after_every_part_was_away(
    paths: dict[str, Path], world: int, frees: bool, dtype: tiny.Dtype
) -> None:
    spec = tiny.spec(paths["lm"], dtype=dtype)
    one = [rested(None, spec, frees=frees)] if world == 1 else spmd.run(world, rested, spec, frees=frees)
    for plain, later in one:
        assert torch.equal(plain, later)


def test_memory_counts_what_is_there(paths: dict[str, Path]) -> None:
    engine = FSDPEngine(tiny.spec(paths["lm"]))
    size = 4 * len(flat(engine))
    assert engine.memory() == {"parameters": size, "gradients": 0, "optimizer": 0, "host": 0}
    engine.accumulate(tiny.rows(), Fit(), tiny.counts(), temperature=1.0)
    assert engine.memory()["gradients"] == size
    engine.optimizer_step()
    assert engine.memory() == {"parameters": size, "gradients": 0, "optimizer": 2 * size, "host": 0}
    parts: list[Part] = ["optimizer"]
    engine.offload(parts)
    assert engine.memory() == {"parameters": size, "gradients": 0, "optimizer": 0, "host": 2 * size}
    assert copy.copy(engine.infer(tiny.rows(), temperature=1.0)).batch_size == (6,)
