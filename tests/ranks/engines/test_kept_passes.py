"""Updates that go back from the passes that evaluated the same rows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.algos import GRPO, PPO, SFT
from rlhf_lightning.callbacks import SampledValidation, SampleTable
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP, FSDPEngine, Head
from rlhf_lightning.functional import DistillationLoss
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Critic, Settings
from tests.unit.algos import small
from tests.unit.algos.short import trainer
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Dtype, Fit

ROOMS = {"all": 1000, "some": 11 + 8 + 7, "none": 1}
"""Some: exactly what the first three of four micro-batches have."""


def made(path: Path, head: Head = "lm", *, kept: int = 1000, **options: object) -> FSDPEngine:
    config = FSDP(max_tokens_per_micro_batch=tiny.LONGEST, kept_tokens=kept)
    return FSDPEngine(tiny.spec(path, **options), head=head, config=config)  # type: ignore[arg-type]


def passes(engine: FSDPEngine) -> list[int]:
    """The tokens of each forward pass from now on."""
    found: list[int] = []
    layer = engine._model.get_submodule("model.layers.0")
    layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].shape[1]))
    return found


def gradients(
    engine: FSDPEngine, loss: Fit | None = None, rows: TensorDict | None = None
) -> dict[str, Tensor]:
    rows = tiny.rows() if rows is None else rows
    engine.accumulate(rows, loss or Fit(), tiny.counts(), temperature=0.7)
    return tiny.gradients(engine)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def evaluate(engine: FSDPEngine) -> TensorDict:
    return engine.infer(tiny.rows(), temperature=0.7, keep=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_an_update_goes_back_from_what_there_was_room_for(
    paths: dict[str, Path], head: Head, room: str, dtype: Dtype
) -> None:
    plain, keeping = (made(paths[head], head, kept=kept, dtype=dtype) for kept in (0, ROOMS[room]))
    plain_passes, kept_passes = passes(plain), passes(keeping)
    name = "log_probs" if head == "lm" else "values"
    assert torch.equal(evaluate(keeping)[name], evaluate(plain)[name])
    each = list(plain_passes)
    assert kept_passes == each
    same(gradients(keeping), gradients(plain))
    assert plain_passes == 2 * each
    spared = {"all": len(each), "some": 3, "none": 0}[room]
    assert len(each) > 3
    assert kept_passes == each + each[spared:]


def other_tokens(engine: FSDPEngine) -> TensorDict:
    rows = tiny.rows()
    rows["response_ids"][1, 2] += 1
    return rows


def another_order(engine: FSDPEngine) -> TensorDict:
    return tiny.rows()[torch.tensor([1, 0, 2, 3, 4, 5])]


def fewer(engine: FSDPEngine) -> TensorDict:
    return tiny.rows()[:4]


def after_a_step(engine: FSDPEngine) -> TensorDict:
    engine.optimizer_step()
    return tiny.rows()


def after_a_transfer(engine: FSDPEngine) -> TensorDict:
    engine.take_weights([(name, weight + 0.01) for name, weight in engine.weights()])
    return tiny.rows()


def after_an_absence(engine: FSDPEngine) -> TensorDict:
    engine.offload(["parameters"])
    engine.reload(["parameters"])
    return tiny.rows()


def once_more(engine: FSDPEngine) -> TensorDict:
    gradients(engine)
    return tiny.rows()


@pytest.mark.parametrize(
    "change",
    [other_tokens, another_order, fewer, after_a_step, after_a_transfer, after_an_absence, once_more],
    ids=lambda change: change.__name__,
)
def test_other_rows_or_weights_are_computed_anew(
    paths: dict[str, Path], change: Callable[[FSDPEngine], TensorDict]
) -> None:
    plain, keeping = (made(paths["lm"], kept=kept) for kept in (0, 1000))
    each = []
    for engine in (plain, keeping):
        evaluate(engine)
        rows = change(engine)
        each.append((passes(engine), gradients(engine, rows=rows)))
    (plain_passes, expected), (kept_passes, found) = each
    assert kept_passes == plain_passes
    assert len(plain_passes) >= 3
    same(found, expected)


def test_another_temperature_is_computed_anew(paths: dict[str, Path]) -> None:
    plain, keeping = (made(paths["lm"], kept=kept) for kept in (0, 1000))
    for engine in (plain, keeping):
        engine.infer(tiny.rows(), temperature=0.3, keep=True)
    same(gradients(keeping), gradients(plain))


def test_a_pass_that_nobody_follows_is_not_kept_and_frees_nothing(paths: dict[str, Path]) -> None:
    engine = made(paths["lm"])
    evaluate(engine)
    found = passes(engine)
    engine.infer(tiny.rows()[:2], temperature=1.0)
    computed = len(found)
    mine = gradients(engine)
    assert len(found) == computed
    same(mine, gradients(made(paths["lm"], kept=0)))


def test_a_loss_without_the_entropy_does_not_see_it(paths: dict[str, Path]) -> None:
    plain, keeping = (made(paths["lm"], kept=kept) for kept in (0, 1000))
    evaluate(keeping)
    blind = Fit(needs_entropy=False)
    same(gradients(keeping, blind), gradients(plain, blind))


def test_a_loss_that_asks_for_candidates_gets_a_pass_of_its_own(paths: dict[str, Path]) -> None:
    rows = tiny.rows()
    rows["candidate_ids"] = rows["response_ids"][..., None].expand(-1, -1, 2).int()
    rows["candidate_ref_log_probs"] = torch.full((*rows["response_ids"].shape, 2), -3.0)
    found = []
    for kept in (0, 1000):
        engine = made(paths["lm"], kept=kept)
        evaluate(engine)
        engine.accumulate(rows, DistillationLoss(), tiny.counts(), temperature=0.7)
        found.append(tiny.gradients(engine))
    same(found[1], found[0])


def test_recomputed_layers_are_spared_one_of_two_passes(paths: dict[str, Path]) -> None:
    plain, thrifty = made(paths["lm"]), made(paths["lm"], gradient_checkpointing=True)
    evaluate(thrifty)
    found = passes(thrifty)
    backward = gradients(thrifty)
    assert found
    computed = passes(plain)
    expected = gradients(plain)
    assert found == computed
    assert tiny.distance(backward, expected) < 1e-6


def test_what_is_kept_is_freed_with_the_update_or_the_next_pass(paths: dict[str, Path]) -> None:
    engine = made(paths["lm"])
    ends: list[Callable[[], object]] = [
        lambda: gradients(engine),
        lambda: evaluate(engine),
        lambda: engine.infer(tiny.rows()[:1], temperature=0.7, keep=True),
        engine.optimizer_step,
        lambda: engine.offload(["optimizer"]),
    ]
    gradients(engine)
    for end in ends:
        graphs: list[weakref.ref[object]] = []
        handle = engine._root.register_forward_hook(
            lambda *args, graphs=graphs: graphs.append(weakref.ref(args[2].logits.untyped_storage()))
        )
        evaluate(engine)
        handle.remove()
        end()
        gc.collect()
        assert len(graphs) >= 3
        assert [graph() for graph in graphs] == [None] * len(graphs)


def test_a_model_in_parts_keeps_nothing() -> None:
    keeping = FSDP(kept_tokens=64)
    keeping.check_ranks(1)
    FSDP(kept_tokens=64, shard=1).check_ranks(4)
    with pytest.raises(
        ValueError, match=r"kept_tokens=64 with shard=0 and tensor=1 on 4 ranks: .* Try shard=1"
    ):
        keeping.check_ranks(4)
    with pytest.raises(ValueError, match=r"^strategy.settings.train.kept_tokens=-1: is negative"):
        FSDP(kept_tokens=-1)
    divided = Settings(train=FSDP(kept_tokens=64, tensor=2, shard=1))
    with pytest.raises(ValueError, match=r"tensor=2 on 1 ranks: only a device with all weights keeps passes"):
        Critic(path="embedded").check_layout(ParallelLayout(t=2), divided)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_run_learns_the_same_with_fewer_passes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A critic, and an actor whose log-probabilities are computed again, update without a forward pass."""
    model = small.write_model(tmp_path)
    ragged = Sampling(max_new_tokens=8, stop_token_ids=tuple(range(64)))
    counted: list[int] = []
    monkeypatch.setattr("rlhf_lightning.engines.packed.passes.forward", _counting(counted))
    ends = []
    for kept in (0, 10_000):
        actor = Actor(path=model, recompute_log_probs=True, sampling=ragged)
        algorithm = PPO(actor=actor) if kind == "ppo" else GRPO(actor=actor, group_size=2)
        settings = Settings(train=FSDP(kept_tokens=kept))
        data = TaskData(num_rows=16, num_val_rows=2, batch_size=8)
        counted.clear()
        ends.append((small.run(algorithm, data, settings=settings), len(counted)))
    (plain, all_), (keeping, fewer_) = ends
    trained = {"ppo": 2, "grpo": 1}[kind]
    assert all_ - fewer_ == 2 * trained
    for role, weights in plain.weights.items():
        for name, weight in weights.items():
            torch.testing.assert_close(keeping.weights[role][name], weight, rtol=0, atol=1e-6)


class CriticKeeps(Local):
    """Of all models the critic alone keeps passes."""

    def settings_of(self, name: str) -> Settings:
        return replace(super().settings_of(name), train=FSDP(kept_tokens=64 if name == "critic" else 0))


def test_rows_stay_where_one_model_keeps_passes(tmp_path: Path) -> None:
    algorithm = PPO(actor=Actor(sampling=Sampling(max_new_tokens=2)))
    data = TaskData(batch_size=2, num_rows=2, num_val_rows=0)
    trainer(CriticKeeps(), tmp_path).fit(algorithm, datamodule=data)
    assert algorithm.rows_stay


def test_rows_are_balanced_where_no_call_keeps_passes(tmp_path: Path) -> None:
    """Of given answers an actor sees the update alone, which has the passes of nobody to take."""
    settings = Settings(train=FSDP(kept_tokens=64))
    data = TaskData(batch_size=2, num_rows=2, num_val_rows=0, completions=True)
    for algorithm in (read := SFT()), (drawn := GRPO(actor=Actor(sampling=Sampling(max_new_tokens=2)))):
        trainer(Local(settings=settings), tmp_path).fit(algorithm, datamodule=data)
    assert (read.rows_stay, drawn.rows_stay) == (False, True)


class Held(Callback):
    """How many passes each model keeps in a validation, and after it."""

    def __init__(self) -> None:
        self.within: dict[str, int] = {}
        self.after: dict[str, int] = {}

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        self.within = _kept(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after = _kept(pl_module)


def _kept(module: pl.LightningModule) -> dict[str, int]:
    engines = {name: role.engine for name, role in small.built(module).items() if role.trains}
    return {n: len(e._passes._kept._outputs) for n, e in engines.items() if isinstance(e, FSDPEngine)}


@pytest.mark.parametrize("looking", [SampleTable(per_token=True), SampledValidation(2)])
def test_a_validation_leaves_nothing_kept(looking: Callback, tmp_path: Path) -> None:
    """It would stay through the next generation, and no update goes back from it."""
    actor = Actor(
        path=small.write_model(tmp_path), recompute_log_probs=True, sampling=Sampling(max_new_tokens=4)
    )
    settings, held = Settings(train=FSDP(kept_tokens=10_000)), Held()
    run = trainer(Local(settings=settings), tmp_path, limit_val_batches=1, callbacks=[looking, held])
    run.fit(PPO(actor=actor), datamodule=TaskData(num_rows=4, num_val_rows=4, batch_size=4))
    assert held.within["actor"] > 0
    assert (held.within["critic"] > 0) == isinstance(looking, SampleTable)
    assert held.after == {"actor": 0, "critic": 0}


def _counting(counted: list[int]) -> Callable[..., object]:
    from rlhf_lightning.engines.packed.forward import forward

    def counting(*args: object, **options: object) -> object:
        counted.append(1)
        return forward(*args, **options)  # type: ignore[arg-type]

    return counting
