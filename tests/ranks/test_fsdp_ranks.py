"""The engine sharded over 2 and 4 ranks gives what it gives on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf_lightning.engines import FSDP, FSDPEngine, Head
from rlhf_lightning.engines.packed.attention import Packed
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.workers import Reference
from tests.unit import spmd
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Fit, Guarded, flat, gradients, masters

SAME = 1e-6


def own(group: dist.ProcessGroup | None, share: Callable[[int], list[int]] | None = None) -> list[int]:
    """Numbers of the rows of this rank: in turn, or as `share` says."""
    if group is None:
        return list(range(len(tiny.MASKS)))
    return share(group.rank()) if share else list(range(len(tiny.MASKS)))[group.rank() :: group.size()]


def accumulated(
    group: dist.ProcessGroup | None,
    spec: ModelSpec,
    *,
    head: Head,
    config: FSDP,
    share: Callable[[int], list[int]] | None = None,
    loss: Fit | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Metrics of all ranks, and gradients."""
    engine = FSDPEngine(spec, head=head, group=group, config=config)
    rows = tiny.rows()[own(group, share)]
    metrics = engine.accumulate(rows, loss or Fit(), tiny.counts(), temperature=0.7)
    total = torch.stack([metrics["test/loss"], metrics["test/tokens"].float()])
    if group is not None:
        dist.all_reduce(total, group=group)
    return total, gradients(engine)


def with_budgets(
    group: dist.ProcessGroup, spec: ModelSpec, head: Head
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """One row, two rows and all rows at once."""
    budgets = (1, 2 * tiny.LONGEST, 1000)
    configs = [FSDP(max_tokens_per_micro_batch=budget) for budget in budgets]
    return [accumulated(group, spec, head=head, config=config) for config in configs]


@pytest.mark.parametrize(("head", "model"), [("lm", "lm"), ("lm", "tied"), ("scalar", "scalar")])
def test_loss_and_gradients_do_not_depend_on_ranks_and_micro_batches(
    paths: dict[str, Path], head: Head, model: str
) -> None:
    expected = tiny.expect(paths[model], head=head, temperature=0.7)
    ranks = spmd.run(2, with_budgets, tiny.spec(paths[model]), head)
    for totals, found in (result for results in ranks for result in results):
        assert totals.tolist() == pytest.approx([expected.loss, tiny.counts().tokens], rel=SAME)
        assert tiny.distance(found, expected.gradients) < SAME


@pytest.mark.parametrize(
    ("reshard", "defer", "loss"), [(False, False, Fit()), (True, True, Fit()), (False, True, Guarded())]
)
def test_ranks_with_no_rows_or_other_numbers_of_micro_batches_take_part(
    paths: dict[str, Path], reshard: bool, defer: bool, loss: Fit
) -> None:
    expected = tiny.expect(paths["lm"], head="lm", temperature=0.7)
    config = FSDP(max_tokens_per_micro_batch=1, reshard_after_forward=reshard, defer_gradient_reduction=defer)
    share = {0: [5, 1, 0, 2], 1: [], 2: [3, 4], 3: [2]}.__getitem__
    results = spmd.run(
        4, accumulated, tiny.spec(paths["lm"]), head="lm", config=config, share=share, loss=loss
    )
    for totals, found in results:
        assert totals[0].item() == pytest.approx(expected.loss, rel=SAME)
        assert tiny.distance(found, expected.gradients) < SAME


def trained(group: dist.ProcessGroup | None, spec: ModelSpec, head: Head = "lm") -> tuple[Tensor, ...]:
    """Three steps; then norms and rates, weights, this rank's outputs, and outputs of the gathered module."""
    engine = FSDPEngine(spec, head=head, group=group, config=FSDP(max_tokens_per_micro_batch=20))
    rows = tiny.rows()[own(group)]
    reports = []
    for _ in range(3):
        engine.accumulate(rows, Fit(), tiny.counts(), temperature=1.0)
        reports.append(list(engine.optimizer_step().values()))
    outputs = engine.infer(rows, temperature=1.0)
    ids, packed = torch.arange(1, 8)[None], Packed([4, 3])
    with engine.gathered() as module, torch.no_grad():
        hidden = module.base_model(
            input_ids=ids, position_ids=packed.position_ids, use_cache=False, sequences=packed
        ).last_hidden_state
        vector = torch.cat([p.flatten() for p in module.parameters()]).float()
    assert {type(p) for p in engine._weights.masters.values()} <= {torch.nn.Parameter, DTensor}
    again = engine.infer(rows, temperature=1.0)
    assert all(torch.equal(again[name], outputs[name]) for name in sorted(outputs.keys()))
    return torch.tensor(reports), flat(engine), outputs[next(iter(outputs.keys()))], hidden.float(), vector


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("head", "model"), [("lm", "lm"), ("lm", "tied"), ("scalar", "scalar")])
def test_training_and_the_gathered_module_do_not_depend_on_the_ranks(
    paths: dict[str, Path], head: Head, model: str, world: int
) -> None:
    spec = tiny.spec(paths[model], eps=1e-5)
    reports, flat, outputs, hidden, vector = trained(None, spec, head)
    torch.testing.assert_close(flat, vector, rtol=0, atol=0)
    for rank, theirs in enumerate(spmd.run(world, trained, spec, head)):
        torch.testing.assert_close(theirs[0], reports, rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs[1], flat, rtol=0, atol=1e-5)
        torch.testing.assert_close(theirs[2], outputs[rank::world], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(theirs[3], hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(theirs[4], theirs[1], rtol=0, atol=0)


def test_bfloat16_on_two_ranks_is_bfloat16_on_one(paths: dict[str, Path]) -> None:
    spec = tiny.spec(paths["lm"], dtype="bfloat16")
    reports, flat, *_, vector = trained(None, spec)
    assert not torch.equal(flat, vector)
    for theirs in spmd.run(2, trained, spec):
        torch.testing.assert_close(theirs[0][0], reports[0], rtol=1e-2, atol=0)
        assert float((theirs[1] - flat).norm() / flat.norm()) < 1e-2
        torch.testing.assert_close(theirs[4], theirs[1].bfloat16().float(), rtol=0, atol=0)


def test_gradients_of_bfloat16_are_summed_over_ranks_in_float32(paths: dict[str, Path]) -> None:
    """Each rank's gradient has the bits that one device computes of its rows; in bfloat16 the sum has not."""
    spec, config = tiny.spec(paths["lm"], dtype="bfloat16"), FSDP(max_tokens_per_micro_batch=1000)
    alone = FSDPEngine(spec, config=config)
    for rank in range(2):
        alone.accumulate(tiny.rows()[rank::2], Fit(), tiny.counts(), temperature=0.7)
    expected = gradients(alone)
    rounded = {name: gradient.bfloat16().float() for name, gradient in expected.items()}
    assert tiny.distance(rounded, expected) > 100 * SAME
    for _, found in spmd.run(2, accumulated, spec, head="lm", config=config):
        assert tiny.distance(found, expected) < SAME


def scored(group: dist.ProcessGroup, spec: ModelSpec) -> tuple[Tensor, dict[str, int], Tensor]:
    """Outputs of this rank's rows, bytes, and the whole weights."""
    engine = FSDPEngine(spec, group=group, config=FSDP(max_tokens_per_micro_batch=20))
    outputs = engine.infer(tiny.rows()[own(group)], temperature=1.0)["log_probs"]
    assert all(isinstance(p, DTensor) for p in engine._root.parameters()), "what was gathered is freed"
    return outputs, engine.memory(), engine.give_weights()


def test_a_model_that_nothing_trains_is_held_once(paths: dict[str, Path]) -> None:
    path = str(paths["lm"])
    frozen = spmd.run(2, scored, Reference(path=path, dtype="bfloat16"))
    trained = spmd.run(2, scored, ModelSpec(path=path, dtype="bfloat16"))
    for (found, held, weights), (expected, other, theirs) in zip(frozen, trained, strict=True):
        assert torch.equal(found, expected)
        assert held["parameters"] == other["parameters"] // 2
        assert torch.equal(weights, theirs.bfloat16().float())


def checkpointed(group: dist.ProcessGroup, spec: ModelSpec) -> tuple[float, float]:
    """Distance of the gradients with and without recomputation."""
    found = []
    for again in (False, True):
        config = FSDP(max_tokens_per_micro_batch=20)
        changed = ModelSpec(path=spec.path, gradient_checkpointing=again)
        found.append(accumulated(group, changed, head="lm", config=config))
    return float(found[0][0][0]), tiny.distance(found[1][1], found[0][1])


def test_gradient_checkpointing_changes_nothing(paths: dict[str, Path]) -> None:
    for loss, apart in spmd.run(2, checkpointed, tiny.spec(paths["lm"])):
        assert loss != 0
        assert apart < SAME


def gathered_first(group: dist.ProcessGroup, spec: ModelSpec) -> dict[str, Tensor]:
    engine = FSDPEngine(spec, group=group, config=FSDP(reshard_after_forward=True))
    with engine.gathered() as module:
        buffers = [*map(id, module.buffers())]
        assert buffers == [*map(id, engine._model.buffers())] != [], "they go to the device with the model"
        first = {name: p.detach().clone() for name, p in module.named_parameters()}
        assert not any(p.requires_grad and p.grad is not None for p in module.parameters())
    assert all(p.is_meta for p in module.parameters())
    assert all(isinstance(p, DTensor) for p in engine._root.parameters())
    return first


def test_a_model_can_be_gathered_before_it_has_computed(paths: dict[str, Path]) -> None:
    expected = masters(FSDPEngine(tiny.spec(paths["lm"])))
    for found in spmd.run(2, gathered_first, tiny.spec(paths["lm"])):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def names(seen: torch.profiler.profile) -> list[str]:
    """Of all operations, as they were recorded: `seen.events()` makes a tree of them, which takes long."""
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    return [event.name() for event in seen.profiler.kineto_results.events()]


def exchanges(group: dist.ProcessGroup, spec: ModelSpec) -> dict[tuple[bool, bool], list[int]]:
    """For each schedule, gathers and reductions of an update of two micro-batches, and gathers of scoring."""
    found = {}
    for reshards, defers in product((True, False), repeat=2):
        config = FSDP(
            max_tokens_per_micro_batch=1, reshard_after_forward=reshards, defer_gradient_reduction=defers
        )
        engine = FSDPEngine(spec, group=group, config=config)
        rows = tiny.rows()[2 * group.rank() : 2 * group.rank() + 2]
        with torch.profiler.profile() as trained:
            engine.accumulate(rows, Fit(), tiny.counts(), temperature=1.0)
        with torch.profiler.profile() as scoring:
            engine.infer(rows, temperature=1.0)
        update, score = names(trained), names(scoring)
        gathers, reductions = "fsdp::all_gather_copy_in", "fsdp::chunk_cat"
        found[reshards, defers] = [update.count(gathers), update.count(reductions), score.count(gathers)]
    return found


@pytest.mark.parametrize("again", [False, True])
def test_layers_are_gathered_as_the_mapping_counts(paths: dict[str, Path], *, again: bool) -> None:
    """Two layers, and the rest, which is gathered once a micro-batch; where all stays, they are one unit."""
    spec = replace(tiny.spec(paths["lm"]), gradient_checkpointing=again)
    for found in spmd.run(2, exchanges, spec):
        assert found == {
            (True, True): [2 * (2 * 2 + 1), 3, 2 * 2 + 1],
            (True, False): [2 * (2 * 2 + 1), 2 * 3, 2 * 2 + 1],
            (False, True): [2, 1, 1],
            (False, False): [2 * 3, 2 * 3, 3],
        }


def test_a_rank_that_fails_is_named_and_none_is_left() -> None:
    def fail(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            raise KeyError("lost")
        dist.barrier()

    with pytest.raises(RuntimeError, match=r"rank 1:\n(.*\n)*KeyError: 'lost'"):
        spmd.run(2, fail)


def test_a_rank_that_hangs_ends_with_the_time_out() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] have not returned"):
        spmd.run_within(1.0, 2, lambda group: group.rank() or threading.Event().wait())
