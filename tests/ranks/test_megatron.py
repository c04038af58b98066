"""The Megatron engine in many layouts, against the FSDP engine on one device."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.utils import GlobalMemoryBuffer
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from rlhf_lightning.engines import Head, Megatron
from rlhf_lightning.engines.megatron import check_layout, parts
from rlhf_lightning.engines.megatron.cpu import on_the_host
from rlhf_lightning.engines.megatron.tokens import Tokens
from rlhf_lightning.engines.packed.packing import plan, select
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.workers import Reference
from tests.unit import spmd
from tests.unit.engines import three_d, tiny
from tests.unit.engines.three_d import BUDGET, MODELS, Trained
from tests.unit.engines.tiny import Fit

SAME = 1e-5
"""float32, in another order."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: three_d.write(directory / name, name) for name in MODELS}


@cache
def expected(spec: ModelSpec, head: Head) -> Trained:
    """On one device."""
    return three_d.train(three_d.fsdp(spec, head), tiny.rows())


def rows_of(replica: int, d: int, *, all_in_one: bool = False) -> TensorDict:
    """The rows of a replica: every d-th, or all of them in the last and none in the others."""
    rows = tiny.rows()
    if all_in_one:
        return rows if replica == d - 1 else rows[:0]
    return rows[replica::d]


def trained(
    group: dist.ProcessGroup,
    layout: ParallelLayout,
    spec: ModelSpec,
    head: Head,
    config: Megatron,
    *,
    all_in_one: bool,
) -> Trained:
    engine = three_d.megatron(three_d.seat(group, layout), spec, head, config)
    made = engine._runs[0].config.sequence_parallel, len(engine._runs), engine._adamw._distributed
    assert made == (config.sequence_parallel, config.chunks, config.distributed_optimizer)
    replica = layout.coordinate(group.rank()).d
    found = three_d.train(engine, rows_of(replica, layout.d, all_in_one=all_in_one))
    assert not any(isinstance(kept, GlobalMemoryBuffer) for kept in gc.get_objects())
    return found


def compare(results: list[Trained], layout: ParallelLayout, theirs: Trained, *, all_in_one: bool) -> None:
    """Outputs and metrics of the ranks that give them, gradients and weights of all."""
    totals = dict.fromkeys(theirs.metrics, 0.0)
    for replica, rank in enumerate(layout.output_ranks):
        for name, values in theirs.outputs.items():
            ours = results[rank].outputs[name]
            wanted = rows_of(replica, layout.d, all_in_one=all_in_one).batch_size[0]
            assert len(ours) == wanted
            picked = values if all_in_one and wanted else values[replica :: layout.d][:wanted]
            torch.testing.assert_close(ours, picked, rtol=SAME, atol=SAME)
        for name, metric in results[rank].metrics.items():
            totals[name] += metric
    assert totals == pytest.approx(theirs.metrics, rel=1e-4)
    for rank, found in enumerate(results):
        assert rank in layout.output_ranks or not found.metrics
        assert found.norms == pytest.approx(theirs.norms, rel=SAME)
        assert not found.gradients or tiny.distance(found.gradients, theirs.gradients) < SAME
        # Adam divides by the root of squares: what is rounding in the gradient can be much in the step.
        torch.testing.assert_close(found.weights, theirs.weights, rtol=0, atol=1e-4)


@dataclass(frozen=True)
class Case:
    model: str
    layout: ParallelLayout
    head: Head = "lm"
    sequence_parallel: bool = False
    chunks: int = 1
    distributed_optimizer: bool = False
    recompute: bool = False
    all_in_one: bool = False
    grad_clip: float = 1.0
    budget: int = BUDGET

    def __str__(self) -> str:
        return f"{self.model}-{self.head}-p{self.layout.p}t{self.layout.t}d{self.layout.d}"


CASES = [
    Case("tied", ParallelLayout(1, 1, 1), grad_clip=0.0),
    Case("biased", ParallelLayout(1, 4, 1), sequence_parallel=True, recompute=True),
    # Three micro-batches, where an interleaved pipeline takes a multiple of p.
    Case("tied", ParallelLayout(2, 2, 1), chunks=2, sequence_parallel=True, budget=16),
    Case("qwen", ParallelLayout(2, 2, 2, order="tdp"), recompute=True, all_in_one=True),
    Case("tied", ParallelLayout(2, 1, 2), distributed_optimizer=True),
    Case("qwen", ParallelLayout(2, 1, 1), head="scalar"),
    Case("biased", ParallelLayout(1, 2, 1), head="reward"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_computes_what_one_device_computes(models: dict[str, Path], case: Case) -> None:
    spec = tiny.spec(models[case.model])
    spec = replace(spec, optimizer=replace(spec.optimizer, grad_clip=case.grad_clip))
    config = Megatron(
        max_tokens_per_micro_batch=case.budget,
        sequence_parallel=case.sequence_parallel,
        chunks=case.chunks,
        distributed_optimizer=case.distributed_optimizer,
    )
    recomputing = replace(spec, gradient_checkpointing=case.recompute)
    layout, together = case.layout, case.all_in_one
    results = spmd.run(
        case.layout.num_ranks,
        trained,
        case.layout,
        recomputing,
        case.head,
        config,
        all_in_one=case.all_in_one,
    )
    compare(results, layout, expected(spec, case.head), all_in_one=together)


def test_bfloat16_has_masters_in_float32(models: dict[str, Path]) -> None:
    layout, spec = ParallelLayout(2, 2, 1), tiny.spec(models["tied"], dtype="bfloat16")
    theirs = expected(spec, "lm")
    config = Megatron(max_tokens_per_micro_batch=BUDGET)
    for found in spmd.run(4, trained, layout, spec, "lm", config, all_in_one=False):
        assert found.norms == pytest.approx(theirs.norms, rel=1e-2)
        assert float((found.weights - theirs.weights).norm() / theirs.weights.norm()) < 1e-2
        # Steps of 1e-3 would be lost on most weights of bfloat16.
        assert not torch.equal(found.weights, found.weights.bfloat16().float())


def scored(
    group: dist.ProcessGroup, layout: ParallelLayout, spec: ModelSpec
) -> tuple[Tensor, dict[str, int]]:
    engine = three_d.megatron(three_d.seat(group, layout), spec, "lm")
    greedy, plain = (engine.infer(tiny.rows(), temperature=number)["log_probs"] for number in (0.0, 1.0))
    assert torch.equal(greedy, plain)
    return engine.infer(tiny.rows(), temperature=0.7)["log_probs"], engine.memory()


def test_a_model_that_nothing_trains_is_held_once(models: dict[str, Path]) -> None:
    layout, path = ParallelLayout(2, 2, 1), str(models["tied"])
    frozen = spmd.run(4, scored, layout, Reference(path=path, dtype="bfloat16"))
    trained = spmd.run(4, scored, layout, ModelSpec(path=path, dtype="bfloat16"))
    for (found, held), (expected, other) in zip(frozen, trained, strict=True):
        assert torch.equal(found, expected)
        assert held == {"parameters": other["parameters"], "gradients": 0, "optimizer": 0, "host": 0}
        assert other["gradients"] > 0
        assert other["optimizer"] > 0


def two(group: dist.ProcessGroup, actor: ModelSpec, critic: ModelSpec) -> list[Tensor]:
    """Two engines of different layouts in one process, their calls mixed; then what is left of them."""
    before = dict(os.environ)
    engines = [
        three_d.megatron(three_d.seat(group, ParallelLayout(p=2)), actor, "lm"),
        three_d.megatron(three_d.seat(group, ParallelLayout(t=2)), critic, "scalar"),
    ]
    for _ in range(three_d.STEPS):
        for engine in engines:
            three_d.step(engine, tiny.rows())
            assert not len(engine.infer(tiny.rows()[:0], temperature=1.0))
    assert dict(os.environ) == before
    assert not parallel_state.is_initialized()
    assert random._CUDA_RNG_STATE_TRACKER is None
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    return [engine.give_weights() for engine in engines]


def test_engines_of_different_layouts_share_a_process(models: dict[str, Path]) -> None:
    actor, critic = tiny.spec(models["qwen"]), tiny.spec(models["tied"])
    for policy, values in spmd.run(2, two, actor, critic):
        torch.testing.assert_close(policy, expected(actor, "lm").weights, rtol=0, atol=1e-4)
        torch.testing.assert_close(values, expected(critic, "scalar").weights, rtol=0, atol=1e-4)


def test_losses_may_ask_for_a_type_on_the_host() -> None:
    with on_the_host():
        found = torch.ones(1).type(torch.float64), torch.ones(1).type(dtype=torch.float64)
    assert {tensor.dtype for tensor in found} == {torch.float64}


def clipped(group: dist.ProcessGroup, spec: ModelSpec, config: Megatron) -> float:
    """The norm by which a rank clips, where the sum of each group is off in its own way, as by rounding."""
    layout = ParallelLayout(t=2, d=2)
    engine, added = three_d.megatron(three_d.seat(group, layout), spec, "lm", config), dist.all_reduce

    def off(x: Tensor, group: dist.ProcessGroup) -> None:
        added(x, group=group)
        x.mul_(1 + dist.get_global_rank(group, 0) / 8)

    def norm() -> float:
        with mock.patch.object(dist, "all_reduce", off):
            return own()

    own, engine._adamw._norm = engine._adamw._norm, norm  # type: ignore[method-assign]
    return three_d.step(engine, rows_of(layout.coordinate(group.rank()).d, layout.d))[1]


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_all_ranks_clip_by_one_norm(models: dict[str, Path], *, distributed_optimizer: bool) -> None:
    spec, config = tiny.spec(models["tied"]), Megatron(distributed_optimizer=distributed_optimizer)
    found = spmd.run(4, clipped, spec, config)
    assert len(set(found)) == 1
    assert found[0] > 0


def recomputed(group: dist.ProcessGroup, spec: ModelSpec, layout: ParallelLayout) -> tuple[int, int, bool]:
    """Attention calls of a step, plain and recomputed; whether a step without a number is left out."""
    calls, queued = [0], len(torch.cuda._queued_calls)
    own = parts.PackedAttention.forward

    def counted(self: parts.PackedAttention, *args: Tensor, **kwargs: Tokens) -> Tensor:
        calls[-1] += 1
        return own(self, *args, **kwargs)

    parts.PackedAttention.forward = counted  # type: ignore[assignment, method-assign]
    seat = three_d.seat(group, layout)
    for again in (False, True):
        changed = ModelSpec(path=spec.path, gradient_checkpointing=again)
        engine = three_d.megatron(seat, changed, "lm", Megatron())
        three_d.step(engine, tiny.rows())
        calls.append(0)
    assert len(torch.cuda._queued_calls) == queued, "nothing waits for a GPU"
    before = engine.give_weights()
    engine.accumulate(tiny.rows(), tiny.Broken(), tiny.counts(), temperature=1.0)
    report = engine.optimizer_step()
    skipped = report["skipped_steps"] == 1 and torch.equal(engine.give_weights(), before)
    return calls[0], calls[1], skipped and three_d.step(engine, tiny.rows())[1] > 0


@pytest.mark.parametrize(("layout", "layers"), [(ParallelLayout(t=2), (3, 3)), (ParallelLayout(p=2), (2, 1))])
def test_recomputation_recomputes_and_a_step_without_a_number_is_left_out(
    models: dict[str, Path], layout: ParallelLayout, layers: tuple[int, int]
) -> None:
    """Attention of every layer, a rank's own."""
    found = spmd.run(2, recomputed, tiny.spec(models["qwen"]), layout)
    for (plain, again, skipped), own in zip(found, layers, strict=True):
        assert (plain, again) == (own, 2 * own)
        assert skipped


@pytest.mark.parametrize(
    ("model", "layout", "chunks", "message"),
    [
        ("qwen", ParallelLayout(t=3), 1, r"t=3\): t does not divide the 4 attention heads. .* t=2 or 4"),
        ("qwen", ParallelLayout(t=8), 1, r"t=8\): t does not divide .* Try train t=4\."),
        ("qwen", ParallelLayout(p=4), 1, r"p=4 stages of 1 chunks for 3 layers.* Try p=3"),
        ("qwen", ParallelLayout(p=2), 2, r"p=2 stages of 2 chunks for 3 layers.* Try chunks=1"),
        (
            "qwen",
            ParallelLayout(),
            2,
            r"^strategy.settings.megatron.chunks=2 with train p=1: .* Try chunks=1",
        ),
        ("tied", ParallelLayout(t=4), 1, ""),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: str, layout: ParallelLayout, chunks: int, message: str
) -> None:
    if not message:
        check_layout(MODELS[model], layout, settings=Megatron(chunks=chunks))
        return
    with pytest.raises(ValueError, match=message):
        check_layout(MODELS[model], layout, settings=Megatron(chunks=chunks))


@pytest.mark.parametrize("t", [3, 6])
def test_shards_of_generation_that_cannot_share_key_value_heads_are_refused(t: int) -> None:
    config = LlamaConfig(
        hidden_size=288, intermediate_size=96, num_attention_heads=12, num_key_value_heads=4, head_dim=24
    )
    with pytest.raises(
        ValueError,
        match=rf"^--strategy.parallel.generate.t {t} \(train t=12\): t neither divides the 4 key-value heads "
        r"nor .* Try --strategy.parallel.generate.t 1 or 2 or 4 or 12\.",
    ):
        check_layout(config, ParallelLayout(t=12, generation=Generation(t=t)))
    for fitting in (1, 2, 4, 12):
        check_layout(config, ParallelLayout(t=12, generation=Generation(t=fitting)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Qwen2Config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
            r"^rope_type=.yarn.: the Megatron engine has",
        ),
        (LlamaConfig(mlp_bias=True), r"^mlp_bias=true: the Megatron engine takes no biases"),
        (
            Qwen3Config(),
            r"^model_type=.qwen3.: Megatron takes llama and qwen2 only\. Take another model, or "
            r"--strategy\.settings\.engine fsdp under a strategy that takes it",
        ),
    ],
)
def test_models_that_megatron_does_not_take_are_refused(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(config, ParallelLayout())


def refused_or_tied(group: dist.ProcessGroup, spec: ModelSpec) -> str:
    """What is said of a model, or "tied"."""
    try:
        engine = three_d.megatron(three_d.seat(group, ParallelLayout(p=2)), spec, "lm")
    except ValueError as err:
        return str(err)
    assert len(engine.give_weights())
    return "tied"


@pytest.mark.parametrize("more", [0.0, 1.0])
def test_a_head_that_is_said_to_be_tied_is_the_embeddings(more: float, tmp_path: Path) -> None:
    path = three_d.write(tmp_path, "tied")
    state = load_file(path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + more
    save_file(state, path / "model.safetensors", {"format": "pt"})
    found = spmd.run(2, refused_or_tied, tiny.spec(path))
    said = "tie_word_embeddings=true, and lm_head.weight in the weight files differs from model.embed_tokens"
    assert all((said in told) if more else (told == "tied") for told in found), found


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch=-1"):
        Megatron(max_tokens_per_micro_batch=-1)
    with pytest.raises(ValueError, match="chunks=0: a stage holds at least 1 run"):
        Megatron(chunks=0)


class Pairs(Fit):
    """Reads two neighbouring rows."""

    @property
    def rows_together(self) -> int:
        return 2


def test_pairs_stay_in_one_micro_batch() -> None:
    assert sorted(plan(tiny.rows(), 1, Pairs())) == [[0, 1], [2, 3], [4, 5]]
    filler = select(tiny.rows(), [], Pairs(), device=torch.device("cpu"))
    assert len(filler["response_mask"]) == 2
