"""What a process takes to load a model: its own part of it, from files of any type."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlhf_lightning.engines import FSDP, FSDPEngine, export_checkpoint
from rlhf_lightning.engines.host_memory import give_back_freed_memory
from rlhf_lightning.parallel import ModelGroups, ParallelLayout
from rlhf_lightning.spec import LoRA, ModelSpec
from rlhf_lightning.workers import Reference
from tests.unit import spmd
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Fit

T = TypeVar("T")

ADAPTERS = LoRA(rank=2, alpha=4.0)
MODELS: dict[str, ModelSpec] = {
    "float32": ModelSpec(),
    "bfloat16": ModelSpec(dtype="bfloat16"),
    "frozen": Reference(),
    "frozen in bfloat16": Reference(dtype="bfloat16"),
    "adapted": ModelSpec(lora=ADAPTERS),
    "adapted in bfloat16": ModelSpec(lora=ADAPTERS, dtype="bfloat16"),
}
ON = {"one": (1, 1), "shards": (2, 1), "tensor": (1, 2)}
"""Data-parallel and tensor ranks."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return tiny.write_in_types(tmp_path_factory.mktemp("written"))


def learned(
    _: dist.ProcessGroup | None, specs: dict[str, ModelSpec], d: int, t: int
) -> dict[str, list[Tensor]]:
    """What models say, and their weights a step later."""
    groups = ModelGroups.create_all(ParallelLayout(t=t, d=d)) if d * t > 1 else None
    return {name: learned_by(spec, groups, d) for name, spec in specs.items()}


def learned_by(spec: ModelSpec, groups: ModelGroups | None, d: int) -> list[Tensor]:
    at = 0 if groups is None else groups.data.rank()
    engine = FSDPEngine(
        spec,
        group=groups.data if groups else None,
        tensor=groups.tensor if groups else None,
        config=FSDP(max_tokens_per_micro_batch=20),
    )
    rows = tiny.rows()[at::d]
    said = engine.infer(rows, temperature=1.0)["log_probs"]
    if spec.weights_change:
        engine.accumulate(rows, Fit(), tiny.counts(), temperature=1.0)
        engine.optimizer_step()
    return [said, torch.cat([weight.flatten().float() for _name, weight in engine.weights()])]


@pytest.mark.parametrize("on", ON)
def test_it_is_the_same_model_whatever_type_its_files_have(written: list[Path], on: str) -> None:
    d, t = ON[on]
    models = [model for model, spec in MODELS.items() if t == 1 or not spec.lora]
    specs = {
        f"{model} of {path.name}": replace(MODELS[model], path=str(path))
        for model in models
        for path in written
    }
    ranks = [learned(None, specs, 1, 1)] if d * t == 1 else spmd.run(d * t, learned, specs, d, t)
    for found, model in product(ranks, models):
        mine, theirs = (found[f"{model} of {path.name}"] for path in written)
        for tensor, other in zip(mine, theirs, strict=True):
            assert torch.equal(tensor, other), model


def anonymous() -> int:
    """Bytes of memory of this process that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def most_during(call: Callable[[], T]) -> tuple[T, int]:
    """What a call returns, and the bytes that it takes at most beyond what was there before."""
    give_back_freed_memory()  # what others freed would hide what this call takes
    before, found, ended = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            found.append(anonymous())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = call()
    finally:
        ended.set()
        watcher.join()
    return result, max(found) - before


def peaks(group: dist.ProcessGroup, spec: ModelSpec, t: int, directory: Path) -> tuple[int, int, int, int]:
    """Bytes for loading, for giving weights and for an export, and how many numbers were given."""
    groups = ModelGroups.create_all(ParallelLayout(t=t, d=group.size() // t))
    engine, loading = most_during(lambda: FSDPEngine(spec, group=groups.data, tensor=groups.tensor))
    given, giving = most_during(lambda: engine.give_weights(wanted=group.rank() == 0))
    _, exporting = most_during(lambda: engine.export(directory))
    return loading, giving, exporting, len(given)


def broad(directory: Path) -> LlamaForCausalLM:
    """A model in bfloat16, none of whose parameters is large beside the whole; it is also written."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=14,
        num_attention_heads=8,
        vocab_size=512,
        max_position_embeddings=64,
    )
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("t", [1, 2])
def test_a_rank_takes_memory_for_its_part_alone(tmp_path: Path, t: int) -> None:
    """Four of them: a whole model in float32 is four times what each keeps, and one gives it to others.

    No parameter is large beside a part: a few of them are on their way at a time, and freed ones linger.
    """
    model = broad(tmp_path)
    size = sum(weight.numel() for weight in model.parameters())
    part = 4 * size / 4
    results = spmd.run(4, peaks, tiny.spec(tmp_path), t, tmp_path / "export")
    for rank, (loading, giving, exporting, given) in enumerate(results):
        assert loading < 3 * part
        assert max(giving, exporting) < (7 if rank == 0 else 2) * part
        assert given == (size if rank == 0 else 0)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(exported[name], weight.float())


def exported_at_most(_: dist.ProcessGroup, spec: ModelSpec, checkpoint: Path, directory: Path) -> int:
    """Bytes that an export from a checkpoint takes, in a process that has built no engine."""
    written, taken = most_during(lambda: export_checkpoint(checkpoint, directory, spec=spec, head="lm"))
    assert written
    return taken


def saved(_: dist.ProcessGroup, spec: ModelSpec, directory: Path) -> None:
    FSDPEngine(spec).save(directory)


def test_an_export_takes_memory_for_what_it_writes(tmp_path: Path) -> None:
    """Not for masters and the model that they began as besides: three times as much in bfloat16."""
    model = broad(tmp_path / "model")
    spec = tiny.spec(tmp_path / "model", dtype="bfloat16")
    spmd.run(1, saved, spec, tmp_path / "checkpoint")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()  # nothing of it is wanted
    [taken] = spmd.run(1, exported_at_most, spec, tmp_path / "checkpoint", tmp_path / "export")
    assert taken < 1.6 * sum(weight.nbytes for weight in model.parameters())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(exported[name], weight)
