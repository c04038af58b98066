"""The base model of an actor's adapters serves as its reference, without a second copy."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from rlhf_lightning.engines import FSDP, FSDPEngine, shared_base_model, train_engine
from rlhf_lightning.engines.head import Asked
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.spec import LoRA, ModelSpec
from rlhf_lightning.strategies import Auto
from rlhf_lightning.workers import Actor, Reference, Role
from tests.unit.engines import tiny
from tests.unit.engines.tiny import SEAT


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return tiny.spec(tiny.write_causal(tmp_path_factory.mktemp("model")))


def adapted(spec: ModelSpec) -> FSDPEngine:
    engine = train_engine(replace(spec, lora=LoRA(rank=2)), head="lm", seat=SEAT, config=FSDP())
    assert isinstance(engine, FSDPEngine)
    return engine


def test_it_stays_what_it_was_while_the_adapters_learn(spec: ModelSpec) -> None:
    actor = adapted(spec)
    below = shared_base_model(spec, seat=SEAT)
    assert below is not None
    plain = FSDPEngine(spec).infer(tiny.rows(), temperature=0.7, asked=Asked(entropy=True))
    for _ in range(2):
        actor.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
        actor.optimizer_step()
        found = below.infer(tiny.rows(), temperature=0.7, asked=Asked(entropy=True))
        assert torch.equal(found["log_probs"], plain["log_probs"])
        assert torch.equal(found["entropy"], plain["entropy"])
        learned = actor.infer(tiny.rows(), temperature=0.7)["log_probs"]
        assert float((learned - plain["log_probs"]).abs().max()) > 1e-3
    assert below.memory() == dict.fromkeys(actor.memory(), 0)


def test_models_that_differ_are_loaded(spec: ModelSpec, tmp_path: Path) -> None:
    assert shared_base_model(spec, seat=SEAT) is None
    actor = adapted(spec)
    assert shared_base_model(replace(spec, dtype="bfloat16"), seat=SEAT) is None
    assert shared_base_model(replace(spec, path=str(tmp_path)), seat=SEAT) is None
    assert shared_base_model(spec, seat=replace(SEAT, layout=ParallelLayout(d=2))) is None
    assert shared_base_model(spec, seat=replace(SEAT, device=torch.device("meta"))) is None
    assert shared_base_model(spec, seat=replace(SEAT, dp_group=cast(dist.ProcessGroup, object()))) is None
    assert shared_base_model(spec, seat=SEAT) is not None
    del actor
    gc.collect()
    assert shared_base_model(spec, seat=SEAT) is None


def test_fresh_weights_of_another_seed_are_loaded(spec: ModelSpec, tmp_path: Path) -> None:
    """Those of files, which no seed changes, are shared."""
    tiny.config().save_pretrained(tmp_path)
    for path, shared in ((spec.path, True), (str(tmp_path), False)):
        actor = adapted(replace(spec, path=path, init_seed=1))
        assert shared_base_model(replace(spec, path=path, init_seed=1), seat=SEAT) is not None
        assert (shared_base_model(replace(spec, path=path, init_seed=2), seat=SEAT) is not None) == shared
        del actor


def test_it_serves_where_the_strategy_says_how_the_actor_generates(spec: ModelSpec) -> None:
    """As `auto` does; the reference, which generates nothing, has the rest of the actor's layout."""
    roles: tuple[Role, ...] = Actor(), Reference()
    seats = [replace(SEAT, layout=Auto().layout(role, "", 1)) for role in roles]
    assert seats[0] != seats[1]
    actor = train_engine(replace(spec, lora=LoRA(rank=2)), head="lm", seat=seats[0], config=FSDP())
    assert shared_base_model(spec, seat=seats[1]) is not None
    del actor


def test_it_comes_and_goes_with_the_weights_it_shares(spec: ModelSpec) -> None:
    actor = adapted(spec)
    actor._offloaded.frees = True
    below = shared_base_model(spec, seat=SEAT)
    assert below is not None
    before = below.infer(tiny.rows(), temperature=1.0)["log_probs"]
    actor.offload(("parameters", "gradients", "optimizer"))
    assert below.reload_bytes() == actor.reload_bytes() > 0
    below.reload(("parameters", "gradients", "optimizer"))
    assert torch.equal(below.infer(tiny.rows(), temperature=1.0)["log_probs"], before)
    with pytest.raises(RuntimeError, match=": gradients, optimizer are offloaded"):
        actor.optimizer_step()
    actor.reload(("gradients", "optimizer"))
    below.offload(("parameters", "gradients", "optimizer"))
    with pytest.raises(RuntimeError, match=": parameters are offloaded"):
        actor.optimizer_step()
    with pytest.raises(RuntimeError, match="parameters are offloaded"):
        below.infer(tiny.rows(), temperature=1.0)
    actor.reload(("parameters", "gradients", "optimizer"))
    actor.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
    actor.optimizer_step()


def test_the_actor_learns_from_no_pass_of_the_base_model(spec: ModelSpec) -> None:
    actor = train_engine(replace(spec, lora=LoRA(rank=2)), head="lm", seat=SEAT, config=FSDP(kept_tokens=999))
    below = shared_base_model(spec, seat=SEAT)
    assert below is not None
    below.infer(tiny.rows(), temperature=1.0, keep=True)
    actor.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
    assert actor.optimizer_step()["grad_norm"] > 0


def test_a_base_model_only_computes_log_probs(spec: ModelSpec, tmp_path: Path) -> None:
    actor = adapted(spec)
    below = shared_base_model(spec, seat=SEAT)
    assert below is not None
    for call in (below.optimizer_step, lambda: below.save(tmp_path), below.generating):
        with pytest.raises(RuntimeError, match="only computes log_probs"):
            call()
    del actor
