"""Weights that parts of the ranks divide, and of which the others hold copies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines import FSDP, FSDPEngine, Head, optimizer
from rlhf_lightning.engines.fsdp.mesh import mesh_groups, model_mesh
from rlhf_lightning.engines.fsdp.replica import Replica
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.spec import ModelSpec
from tests.unit import spmd
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Dtype, Fit, flat, step


def engine_of(
    group: dist.ProcessGroup | None, spec: ModelSpec, config: FSDP, head: Head = "lm"
) -> FSDPEngine:
    """The engine of one rank, and before it the groups that a job makes for it."""
    if group is not None:
        tiny.make_groups(config, ParallelLayout(d=group.size()))
    return FSDPEngine(spec, head=head, group=group, config=config)


def trained(
    group: dist.ProcessGroup | None, spec: ModelSpec, head: Head, config: FSDP
) -> tuple[list[list[float]], Tensor, Tensor, int]:
    """Three steps: what they report, the weights, those of the gathered module, and bytes of the moments."""
    engine = engine_of(group, spec, config, head)
    reports = [list(step(engine, group).values()) for _ in range(3)]
    with engine.gathered() as module:
        vector = torch.cat([p.flatten() for p in module.parameters()])
    return reports, flat(engine), vector, engine.memory()["optimizer"]


def with_shards(
    group: dist.ProcessGroup, spec: ModelSpec, head: Head, configs: list[FSDP]
) -> list[tuple[list[list[float]], Tensor, Tensor, int]]:
    return [trained(group, spec, head, config) for config in configs]


@pytest.mark.parametrize(("head", "eager"), [("lm", False), ("scalar", True)])
def test_copies_learn_what_one_division_over_all_learns(
    paths: dict[str, Path], head: Head, eager: bool
) -> None:
    """`eager` gives memory back after every layer and reduces after every micro-batch."""
    options = {"reshard_after_forward": eager, "defer_gradient_reduction": not eager}
    spec = tiny.spec(paths[head], eps=1e-5)
    reports, flat, *_, whole_bytes = trained(None, spec, head, FSDP(max_tokens_per_micro_batch=20))
    configs = [FSDP(max_tokens_per_micro_batch=20, shard=shard, **options) for shard in (1, 2, 4)]
    for ranks in spmd.run(4, with_shards, spec, head, configs):
        for config, theirs in zip(configs, ranks, strict=True):
            torch.testing.assert_close(torch.tensor(theirs[0]), torch.tensor(reports), rtol=1e-5, atol=0)
            torch.testing.assert_close(theirs[1], flat, rtol=0, atol=1e-5)
            torch.testing.assert_close(theirs[2], theirs[1], rtol=0, atol=0)
            assert theirs[3] == pytest.approx(whole_bytes / config.shard, rel=0.05)


def saved(group: dist.ProcessGroup, spec: ModelSpec, directory: Path, shard: int) -> tuple[Tensor, Tensor]:
    engine = engine_of(group, spec, FSDP(shard=shard))
    step(engine, group)
    engine.save(directory / "checkpoint")
    engine.export(directory / "export")
    before = flat(engine)
    step(engine, group)
    return before, flat(engine)


def continued(
    group: dist.ProcessGroup | None, spec: ModelSpec, directory: Path, shard: int
) -> tuple[Tensor, Tensor]:
    engine = engine_of(group, spec, FSDP(shard=shard))
    engine.load(directory / "checkpoint")
    before = flat(engine)
    step(engine, group)
    return before, flat(engine)


@pytest.mark.parametrize("shard", [1, 2])
def test_a_checkpoint_of_copies_continues_elsewhere(
    paths: dict[str, Path], tmp_path: Path, shard: int
) -> None:
    spec = tiny.spec(paths["lm"])
    before, later = spmd.run(4, saved, spec, tmp_path, shard)[0]
    exported = torch.cat([w.flatten() for _, w in FSDPEngine(tiny.spec(tmp_path / "export")).weights()])
    assert torch.equal(exported, before)
    others = [continued(None, spec, tmp_path, 0)]
    others += spmd.run(4, continued, spec, tmp_path, 3 - shard)
    for read, moved in others:
        assert torch.equal(read, before)
        torch.testing.assert_close(moved, later, rtol=0, atol=1e-5)


def followed(group: dist.ProcessGroup, spec: ModelSpec, given: Tensor, shard: int) -> Tensor:
    engine = engine_of(group, spec, FSDP(shard=shard))
    engine.follow_weights(given, decay=0.25)
    return engine.give_weights()


@pytest.mark.parametrize("shard", [1, 2])
def test_copies_follow_another_model(paths: dict[str, Path], shard: int) -> None:
    spec = tiny.spec(paths["lm"])
    own = FSDPEngine(spec).give_weights()
    given = torch.randn(len(own), generator=torch.Generator().manual_seed(0))
    for found in spmd.run(4, followed, spec, given, shard):
        torch.testing.assert_close(found, 0.25 * own + 0.75 * given, rtol=0, atol=1e-6)


def uneven(
    group: dist.ProcessGroup, spec: ModelSpec, bucket_bytes: int, dtype: Dtype
) -> tuple[Tensor, list[list[float]]]:
    """Three steps in which the first rank has all rows but one, which the last has; the others have none."""
    optimizer._BUCKET_BYTES = bucket_bytes
    config = FSDP(max_tokens_per_micro_batch=20, shard=1)
    engine = engine_of(group, replace(spec, dtype=dtype), config)
    first, last = group.rank() == 0, group.rank() == group.size() - 1
    rows = tiny.rows()[: -1 if first else None][slice(None) if first else slice(-1 if last else 99, None)]
    reports = []
    for _ in range(3):
        engine.infer(rows, temperature=1.0)
        engine.accumulate(rows, Fit(), tiny.counts(), temperature=1.0)
        reports.append(list(engine.optimizer_step().values()))
    return flat(engine), reports


@pytest.mark.parametrize(
    ("bucket_bytes", "dtype", "apart"),
    [(1 << 26, "float32", 1e-5), (1000, "float32", 1e-5), (1, "bfloat16", 5e-3)],
)
def test_copies_with_different_numbers_of_micro_batches_stay_equal(
    paths: dict[str, Path], bucket_bytes: int, dtype: Dtype, apart: float
) -> None:
    spec = tiny.spec(paths["lm"])
    alone = FSDPEngine(replace(spec, dtype=dtype), config=FSDP(max_tokens_per_micro_batch=20))
    reports = [list(step(alone).values()) for _ in range(3)]
    ranks = spmd.run(3, uneven, spec, bucket_bytes, dtype)
    torch.testing.assert_close(
        torch.tensor(ranks[0][1]), torch.tensor(reports), rtol=max(1e-5, apart), atol=0
    )
    torch.testing.assert_close(ranks[0][0], flat(alone), rtol=0, atol=apart)
    for found, _ in ranks[1:]:
        assert torch.equal(found, ranks[0][0])


def unused(group: dist.ProcessGroup, spec: ModelSpec) -> bool:
    """Whether a step leaves a parameter as it is that no pass has used."""
    engine = engine_of(group, spec, FSDP(shard=1))
    engine.accumulate(tiny.rows()[group.rank() :: group.size()], Fit(), tiny.counts(), temperature=1.0)
    master = engine._weights.masters["model.norm.weight"]
    master.grad, before = None, master.detach().clone()
    engine.optimizer_step()
    return torch.equal(master, before)


def test_copies_sum_the_gradients_that_there_are(paths: dict[str, Path]) -> None:
    assert spmd.run(2, unused, tiny.spec(paths["lm"])) == [True, True]


def norm(group: dist.ProcessGroup, spec: ModelSpec) -> float:
    """By which a rank clips where the second copy has other gradients, as rounding might do."""
    engine = engine_of(group, spec, FSDP(shard=2))
    engine.accumulate(tiny.rows()[group.rank() :: group.size()], Fit(), tiny.counts(), temperature=1.0)
    for master in engine._weights.masters.values():
        assert master.grad is not None
        master.grad.mul_(1 + group.rank() // 2)
    return engine.optimizer_step()["grad_norm"]


def test_copies_clip_by_one_norm(paths: dict[str, Path]) -> None:
    spec = tiny.spec(paths["lm"])
    alone = step(FSDPEngine(spec))["grad_norm"]
    found = spmd.run(4, norm, spec)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(alone * 2.5**0.5, rel=1e-5)  # half of 1 and half of 2 squared


def test_a_division_that_leaves_ranks_over_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^strategy.settings.train.shard=3 on 4 ranks: 3 does not divide 4. Try 1, 2, 4."
    ):
        FSDP(shard=3).check_ranks(4)
    with pytest.raises(ValueError, match=r"^strategy.settings.train.shard=-1: is negative"):
        FSDP(shard=-1)
    for ranks in (1, 2, 4):
        FSDP(shard=2).check_ranks(ranks)


def test_one_rank_with_rows_has_all_of_a_copy_whatever_is_said() -> None:
    FSDP(shard=2, tensor=2).check_ranks(1)
    assert set(mesh_groups([[4, 5]], shard=2)) == {(4, 5)}


def alone(group: dist.ProcessGroup, spec: ModelSpec) -> bool:
    """Whether a model in a group of one rank is whole there."""
    return isinstance(FSDPEngine(spec, group=group)._weights, Replica)


def test_a_rank_in_a_group_of_its_own_divides_nothing(paths: dict[str, Path]) -> None:
    assert spmd.run(1, alone, tiny.spec(paths["lm"])) == [True]


def groups_of(group: dist.ProcessGroup, shard: int) -> list[str]:
    """The names of the groups of a model's mesh."""
    mesh = model_mesh(group, None, shard=shard, device=torch.device("cpu"))
    axes = [mesh.data.get_group(name) for name in mesh.data.mesh_dim_names or ()]
    return [each.group_name for each in (*axes, mesh.everyone)]


def three_models(group: dist.ProcessGroup) -> list[list[str]]:
    """The groups of three models, for which the job makes those of the first."""
    tiny.make_groups(FSDP(shard=2), ParallelLayout(d=group.size()))
    return [groups_of(group, shard) for shard in (2, 2, 4)]


def test_models_on_the_same_ranks_share_the_groups_of_their_job() -> None:
    for first, second, whole in spmd.run(4, three_models):
        assert first == second
        assert len(set(first)) == 3
        assert whole == [first[-1]] * 2


def lacking(group: dist.ProcessGroup) -> None:
    """A mesh without the groups that a job makes."""
    with pytest.raises(AssertionError, match=r"^the job has made no group of the ranks \[[01], [23]\]$"):
        model_mesh(group, None, shard=2, device=torch.device("cpu"))


def test_a_group_that_nobody_has_made_is_not_waited_for() -> None:
    spmd.run(4, lacking)
