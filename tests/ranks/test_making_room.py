"""Models that make room for each other: their bytes come and go, and every number stays what it was."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from rlhf_lightning.controller import WorkerError
from rlhf_lightning.engines import PARTS, FSDPEngine
from rlhf_lightning.spec import LoRA
from rlhf_lightning.workers import Actor, Reward, Role
from tests.unit.engines import tiny
from tests.unit.pretended import GPU, Stream, pretended
from tests.unit.workers.rooms import MODEL_BYTES, Held, Job


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_causal(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "adapters"])
@pytest.mark.parametrize("models", [None, 4, 100])
def test_numbers_do_not_depend_on_the_room(model: Path, lora: LoRA | None, models: int | None) -> None:
    """A device for one, for some, and for all: with its moments a model is three, and what it learns four."""
    size = 0 if models is None else models * MODEL_BYTES
    with closing(Job(model, lora, gauge=None, offload=False)) as job:
        expected = job.run()
        assert not job.came
    with closing(Job(model, lora, gauge=partial(Held, size=size) if size else None)) as job:
        found = job.run()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert not isinstance(job.gauge, Held) or job.gauge.most <= size
        job.came.clear()
        job.iteration()
        assert (not job.came) == (models == 100)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "adapters"])
def test_bytes_leave_a_pretended_gpu_beside_its_computation(model: Path, lora: LoRA | None) -> None:
    with closing(Job(model, lora, gauge=None, offload=False)) as job:
        expected = job.run()
    with pretended(), closing(Job(model, lora, gauge=None, device=GPU)) as job:
        found = job.run()
        Stream.told.clear()
        engine = cast(Role, job.device.roles["actor"]).engine
        assert isinstance(engine, FSDPEngine)
        masters = engine._weights.masters.values()
        held = sum(engine.memory()[part] for part in PARTS)
        engine.offload(PARTS)
        assert engine.reload_bytes() == held > 0
        assert {master.untyped_storage().nbytes() for master in masters} == {0}
        assert set(Stream.told) == {"record_stream", "record_event"}, "nobody waits"
        engine.reload(PARTS)
        assert engine.reload_bytes() == 0
        assert Stream.told[-2:] == ["wait_event", "synchronize"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "adapters"])
def test_what_lies_in_a_model_makes_no_room_for_it(
    model: Path, lora: LoRA | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference below adapters is the actor: all but both leave where the actor takes all memory."""
    monkeypatch.setattr(Actor, "takes_all", lambda _, method: method == "compute_log_prob")
    with closing(Job(model, lora, gauge=partial(Held, size=100 * MODEL_BYTES))) as job:
        job.run()
        job.came.clear()
        job.iteration()
        assert sorted(job.came) == (["critic", "reference"] if lora is None else ["critic"])


def test_questions_about_models_move_none(model: Path, tmp_path: Path) -> None:
    judge = Reward(path=str(tiny.write_scalar(tmp_path)), functions="exact_match")
    with closing(Job(model, None, gauge=None)) as job:
        reward, hosted = job.host("reward", judge), job.device.roles["reward"]
        hosted.reload()
        hosted.offload()
        job.iteration()
        job.came.clear()
        (critic,), (actor,) = job.critic.memory().fetch(), job.actor.memory().fetch()
        assert critic["host"] > sum(critic[part] for part in PARTS) == 0
        assert sum(actor[part] for part in PARTS) > actor["host"] == 0
        assert reward.count_retries().fetch() == [0]
        assert (hosted.reload_bytes() > 0, job.came) == (True, [])
        job.critic.compute_values(job.rows())
        job.actor.transition().fetch()
        assert job.critic.memory().fetch()[0]["host"] == 0


def test_a_loss_that_looks_for_what_is_not_there_is_told_so_where_nothing_is_learned(model: Path) -> None:
    with closing(Job(model, None, gauge=None, offload=False)) as job:
        for wanted, said in (
            ("entropy", r"Looking reads 'entropy', .* outputs \['log_prob"),
            ("", "compute_loss: KeyError"),
        ):
            with pytest.raises(WorkerError, match=said):
                job.actor.compute_loss(job.rows(), loss=tiny.Looking(wanted)).fetch()
        with pytest.raises(WorkerError, match=r"update_actor: loss=run: is a function\. Derive"):
            job.actor.update_actor(job.rows(), loss=Job.run).fetch()  # type: ignore[arg-type]
