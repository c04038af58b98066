"""Memory: against what the engine and its key-value cache really hold."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from rlhf_lightning.engines import FSDP, Megatron, NativeGenerator
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.fsdp.engine import FSDPEngine
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.functional import Counts, PolicyLoss
from rlhf_lightning.mapping import memory, shapes
from rlhf_lightning.mapping.observe import recipe
from rlhf_lightning.mapping.probe import made_rows
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import Generation, ParallelLayout
from rlhf_lightning.spec import EMBEDDED, ModelSpec, Sampling
from rlhf_lightning.workers import Actor, Settings
from tests.unit.mapping.test_shapes import SMOLLM2

pytestmark = pytest.mark.unit

ONE = ParallelLayout()
ROWS, PROMPT, RESPONSE = 6, 8, 16
MADE = made_rows(ROWS, prompt=PROMPT, response=RESPONSE, vocabulary=200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_of_the_embedded_model(dtype: str) -> None:
    engine = FSDPEngine(ModelSpec(path=EMBEDDED, dtype=dtype))  # type: ignore[arg-type]
    engine.accumulate(MADE, PolicyLoss(), Counts.of(MADE["response_mask"]), temperature=1.0)
    gradients = engine.memory()["gradients"]
    engine.optimizer_step()
    half = dtype == "bfloat16"
    predicted = memory.training(
        shapes.load(EMBEDDED), ONE, Workload(element=2 if half else 4, masters=half, sharding="none")
    )
    measured = engine.memory()
    assert predicted.parameters == pytest.approx(measured["parameters"], rel=0.01)
    assert predicted.gradients == pytest.approx(gradients, rel=0.01)
    assert predicted.states == pytest.approx(measured["optimizer"], rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_embedded_model_holds_between_updates(dtype: Literal["float32", "bfloat16"]) -> None:
    """A step frees the gradients, and one device draws answers with the weights that it trains."""
    engine = FSDPEngine(ModelSpec(path=EMBEDDED, dtype=dtype))
    engine.accumulate(MADE, PolicyLoss(), Counts.of(MADE["response_mask"]), temperature=1.0)
    engine.optimizer_step()
    work, shape = recipe(Actor(dtype=dtype), Settings()), shapes.load(EMBEDDED)
    predicted = memory.footprint(shape, ONE, work, trained=True)
    measured = engine.memory()
    assert measured["gradients"] == predicted.gradients == 0
    assert predicted.total == pytest.approx(sum(measured.values()), rel=0.01)
    assert memory.resting(shape, ONE, work, trained=True) == predicted
    with engine.generating():
        assert memory.generation(shape, ONE, work).parameters == engine.transition().received_bytes == 0
    copies = [memory.generation(shape, ParallelLayout(d=d), work).parameters for d in (2, 4)]
    assert copies == [work.element * shape.num_parameters] * 2


def test_an_engine_has_keys_and_values_of_the_rows_that_it_admits() -> None:
    """Of one row at the least, whatever limit is typed."""
    shape = shapes.load(EMBEDDED)
    work = Workload(batch=6, mini_batches=1, kv_limit=1, max_resident=2)
    two = memory.kv_needed(shape, ONE, work)
    assert memory.kv_needed(shape, ONE, dataclasses.replace(work, max_resident=0)) == 3 * two
    assert memory.kv_limit(shape, ONE, work, device=1e12) == two / 2


def test_keys_and_values_of_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[Cache] = []
    make = Cache.__init__

    def noted(self: Cache, slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        make(self, slots, capacity, dtype=dtype)
        caches.append(self)

    monkeypatch.setattr(Cache, "__init__", noted)
    with FSDPEngine(ModelSpec(path=EMBEDDED)).generating() as decoder:
        generator = NativeGenerator(decoder, device="cpu", ends=Ends(pad_token_id=0))
        generator.generate(MADE, sampling=Sampling(max_new_tokens=RESPONSE), seed=0)
    measured = sum(block.nbytes for cache in caches for pair in cache.layers.values() for block in pair)
    workload = Workload(
        prompt=PROMPT, real_prompt=PROMPT, response=RESPONSE, batch=ROWS, mini_batches=1, element=4
    )
    predicted = memory.kv_needed(shapes.load(EMBEDDED), ONE, workload)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_a_135m_model(tmp_path: Path) -> None:
    """By hand; `benchmarks/mapping_memory.py` measures one."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    predicted = memory.training(shapes.load(str(tmp_path)), ONE, Workload(sharding="none"))
    assert predicted.parameters == 134_515_008 * (2 + 4)
    assert (predicted.gradients, predicted.states) == (134_515_008 * 4, 134_515_008 * 8)
    # 30 layers of 3 key heads of 64, keys and values, in two bytes
    assert shapes.load(str(tmp_path)).kv_bytes() == 30 * 3 * 64 * 2 * 2


def test_what_ranks_share_out_is_divided() -> None:
    shape, layout = shapes.load("llama-7b"), ParallelLayout(p=1, t=2, d=4)
    none, states, gradients, full = (
        memory.training(shape, layout, Workload(sharding=how))
        for how in ("none", "states", "gradients", "full")
    )  # fmt: skip
    whole = shape.num_parameters / 2
    assert (none.parameters, none.gradients, none.states) == (6 * whole, 4 * whole, 8 * whole)
    assert (states.parameters, states.gradients, states.states) == (3 * whole, 4 * whole, 2 * whole)
    assert (gradients.parameters, gradients.gradients, gradients.states) == (3 * whole, whole, 2 * whole)
    assert (full.parameters, full.gradients, full.states) == (whole, whole, 2 * whole)
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert (states.buffers, full.buffers) == (0, 2 * layer * 2 / 2)  # two layers gathered, in two bytes


@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("defers", [False, True])
def test_what_fsdp_does_not_free_is_whole(*, reshards: bool, defers: bool) -> None:
    """Weights from the first pass on, and gradients until they are reduced; neither between two updates."""
    shape, layout = shapes.load("llama-7b"), ParallelLayout(d=4)
    work = Workload(sharding="full", reshards=reshards, defers=defers)
    found = memory.training(shape, layout, work)
    count, layer = shape.num_parameters, shape.layer_parameters
    assert found.gradients == (4 * count if defers else count)
    gathered = 2 * (2 * layer if reshards else count)  # in two bytes
    assert found.buffers == memory.inference(shape, layout, work).buffers == gathered
    assert memory.resting(shape, layout, work, trained=True).total == 16 * count / 4
    alone = memory.training(shape, ONE, work)
    assert (alone.gradients, alone.buffers) == (4 * count, 0)


def test_recomputation_and_sequence_parallelism_save_activations() -> None:
    """Korthikanti 2022, table 2: 34, 10 + 24 / t and 34 / t bytes a token, layer and hidden unit of a GPT."""
    shape = dataclasses.replace(
        shapes.load("llama-7b"), gated=False, intermediate=4 * 4096, head="scalar", vocab=1
    )
    keep = Workload(recompute=False, micro_batch_tokens=2048)
    per_unit = 32 * 2048 * 4096
    logits = 2048 * 10
    one = memory.training(shape, ONE, keep).activations - logits
    eight = memory.training(shape, ParallelLayout(t=8), keep).activations - logits
    spread = dataclasses.replace(keep, sequence_parallel=True)
    least = memory.training(shape, ParallelLayout(t=8), spread).activations - logits
    assert [one / per_unit, eight / per_unit, least / per_unit] == pytest.approx([34, 10 + 24 / 8, 34 / 8])
    again = memory.training(shape, ONE, dataclasses.replace(keep, recompute=True)).activations - logits
    assert again / per_unit == pytest.approx(2 + 34 / 32)
    words = dataclasses.replace(shape, head="lm", vocab=32000)
    shared = memory.training(words, ParallelLayout(t=8), keep).activations
    assert shared == pytest.approx(eight + logits * 32000 / 8)
    spread = dataclasses.replace(spread, recompute=True)
    both = memory.training(shape, ParallelLayout(t=8), spread).activations - logits
    assert both / per_unit == pytest.approx((2 + 34 / 32) / 8)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_pipeline_holds_as_many_micro_batches_as_it_has_stages(*, recompute: bool) -> None:
    shape, work = shapes.load("llama-7b"), Workload(recompute=recompute, micro_batch_tokens=2048)
    whole = memory.training(shape, ParallelLayout(p=1), work)
    staged = memory.training(shape, ParallelLayout(p=4), work)
    assert staged.activations == pytest.approx(whole.activations)
    assert staged.parameters < 0.3 * whole.parameters
    # Without logits the first stage is the largest, which has the embedding.
    scoring = memory.inference(shape.with_head("scalar"), ParallelLayout(p=4), work)
    assert scoring.parameters == 2 * (8 * shape.layer_parameters + 32000 * 4096 + 4096)


@pytest.mark.parametrize(
    ("p", "chunks", "rows", "runs"), [(4, 1, 64, 4), (4, 2, 64, 11 / 2), (2, 3, 64, 7 / 3), (4, 2, 5, 5)]
)
def test_an_interleaved_pipeline_holds_more(p: int, chunks: int, rows: int, runs: float) -> None:
    """Runs on the first stage, of a part of its layers each, but no more than there are micro-batches."""
    shape = shapes.load("llama-7b")
    work = Workload(batch=rows, mini_batches=1, micro_batch_tokens=2048, recompute=False, chunks=chunks)
    logits = 2048 * shape.vocab * 10
    one = memory.training(shape, ONE, dataclasses.replace(work, chunks=1)).activations - logits
    staged = memory.training(shape, ParallelLayout(p=p), work).activations - logits
    assert staged == pytest.approx(one / p * runs)
    settings = Settings(engine="megatron", megatron=Megatron(chunks=chunks))
    assert recipe(Actor(), settings).chunks == chunks
    assert recipe(Actor(), Settings()).chunks == 1


def test_kept_passes_rest_on_the_device_until_the_update() -> None:
    shape, plain = (
        shapes.load("llama-7b"),
        Workload(recompute=False, micro_batch_tokens=2048, sharding="none"),
    )
    keeping = dataclasses.replace(plain, kept_tokens=8192)
    of_2048 = memory.training(shape, ONE, plain).activations - 2048 * 10 * shape.vocab
    kept = 4 * of_2048 + 8192 * 2 * shape.vocab
    assert memory.resting(shape, ONE, keeping, trained=True).activations == pytest.approx(kept)
    assert memory.resting(shape, ONE, keeping, trained=False).activations == 0
    assert memory.training(shape, ONE, keeping).activations == pytest.approx(kept + 2048 * 10 * shape.vocab)
    for d in (1, 4):
        few = dataclasses.replace(keeping, batch=d, mini_batches=1)
        resting = memory.resting(shape, ParallelLayout(d=d), few, trained=True)
        assert resting.activations == pytest.approx(kept / 4)


@pytest.mark.parametrize("trained", [True, False])
def test_with_offload_a_model_waits_whole_in_the_host(*, trained: bool) -> None:
    shape = shapes.load("llama-7b")
    stays = memory.resting(shape, ONE, Workload(sharding="none"), trained=trained)
    leaves = memory.resting(shape, ONE, Workload(sharding="none", offload=True), trained=trained)
    assert (stays.total, stays.host) == ((18 if trained else 2) * shape.num_parameters, 0)
    assert (leaves.total, leaves.host) == (0, stays.total)
    # A pass that is kept would not outlive the way to the host.
    kept = Workload(sharding="none", offload=True, kept_tokens=8192)
    assert memory.resting(shape, ONE, kept, trained=trained).host == stays.total


def test_a_training_shard_is_part_of_the_generation_shard() -> None:
    """HybridFlow section 5.3: no redundancy on the actor's own devices."""
    shape, layout = shapes.load("llama-13b"), ParallelLayout(1, 8, 2, generation=Generation(1, 2))
    shared = memory.generation(shape, layout, Workload())
    twice = memory.generation(shape, layout, Workload(held_once=False))
    assert twice.parameters == shape.num_parameters * 2 / 2
    assert twice.parameters - shared.parameters == pytest.approx(shape.num_parameters * 2 / 8)
    divided = memory.generation(shape, layout, Workload(sharding="full"))
    assert divided.parameters == twice.parameters  # a device rests with a share of its training shard


def test_a_generation_computes_4096_tokens_of_prompts_and_the_logits_of_256_rows() -> None:
    """By hand; a token takes 5 h outside the shards, and inside 4 h of attention and 4 of the wide layer."""
    layout = ParallelLayout(1, 8, 2, generation=Generation(1, 2))
    token = 2 * (5 * 4096 + (4 * 4096 + 4 * 11008) / 2)
    found = memory.generation(shapes.load("llama-7b"), layout, Workload())
    assert found.buffers == 4096 * token + 256 * (4 + 4) * 32000 / 2


@pytest.mark.parametrize(
    ("room", "limit", "rows"), [(10.5, 256, 10), (63.9, 0, 63), (64, 256, 0), (999, 8, 8), (0.5, 256, 1)]
)
def test_rows_have_room_at_their_longest(room: float, limit: int, rows: int) -> None:
    """Of 64 rows; each has 1,024 tokens of prompt and of response, of 2 x 2 bytes x 32 layers x 4,096."""
    work = Workload(batch=64, mini_batches=1, max_resident=limit, lengths=(64, 128))
    free = room * 2048 * 2 * 2 * 32 * 4096
    assert memory.rows_at_once(shapes.load("llama-7b"), ONE, work, free=free) == rows


@pytest.mark.parametrize("sharers", [2, 4])
def test_what_some_ranks_share_out_is_held_in_copies(sharers: int) -> None:
    settings = Settings(train=FSDP(shard=sharers, defer_gradient_reduction=False))
    work = recipe(Actor(dtype="bfloat16"), settings)
    shape = shapes.load("llama-7b")
    found = memory.training(shape, ParallelLayout(d=8), work)
    held = found.parameters + found.gradients + found.states
    assert held == pytest.approx(16 * shape.num_parameters / sharers)  # docs/fsdp.md
    frozen = memory.inference(shape, ParallelLayout(d=8), work).parameters
    assert frozen == pytest.approx(2 * shape.num_parameters / sharers)
    assert work.sharers(1) == 1, "fewer ranks than that hold one copy"


def test_a_micro_batch_has_no_more_rows_than_a_replica() -> None:
    shape, work = shapes.load("llama-13b"), Workload(batch=1024, mini_batches=8)
    whole, one = (memory.training(shape, ParallelLayout(1, 8, d), work).activations for d in (16, 128))
    assert work.micro_batch == 4
    assert one == pytest.approx(whole / 4)
    few = dataclasses.replace(work, batch=64, mini_batches=1)
    scored = [memory.inference(shape, ParallelLayout(1, 8, d), few).activations for d in (16, 64)]
    assert scored[1] == pytest.approx(scored[0] / 4)
