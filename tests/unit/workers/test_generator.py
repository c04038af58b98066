"""Which group a call of the actor's handle goes to, and when weights go to the generator first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch.distributed import ProcessGroup

from rlhf_lightning.controller import DP_METRIC, Batch, Worker, register
from rlhf_lightning.controller.register import Method, methods_of
from rlhf_lightning.controller.transfer import Inputs
from rlhf_lightning.engines import VLLM, FSDPEngine
from rlhf_lightning.parallel import Link, ParallelLayout
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import EMBEDDED, Sampling
from rlhf_lightning.strategies import OneStepOff, OpenRLHF, Pipelined
from rlhf_lightning.workers import (
    Actor,
    GenerationAhead,
    GenerationInParts,
    Generator,
    PartialGeneration,
    Role,
    SeparateGeneration,
    Settings,
)
from rlhf_lightning.workers.actor import ANSWERS
from rlhf_lightning.workers.generator import LinkedSource
from rlhf_lightning.workers.in_hand import NUMBERS, Carry
from rlhf_lightning.workers.underway import Underway

METHODS = methods_of(Actor)
R = TypeVar("R", bound=Role)


@dataclass
class Noting:
    """A group of workers that notes its calls, and answers each row with its id."""

    name: str
    calls: list[str]
    row_ids: list[list[int]] = field(default_factory=list)
    given: Mapping[str, object] = field(default_factory=dict)

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        self.calls.append(f"{self.name}.{method.name}")
        self.given = arguments
        if batch is None:
            return None
        self.row_ids.append(batch["row_ids"].tolist())
        return Batch.of({"response_ids": batch["row_ids"][:, None], "log_probs": torch.ones(len(batch), 1)})


def batch(first: int, rows: int = 3) -> Batch:
    return Batch.of({"row_ids": torch.arange(first, first + rows)})


def test_weights_go_before_the_first_answers_and_after_every_change() -> None:
    calls: list[str] = []
    separate = SeparateGeneration(
        Noting("actor", calls), Noting("generator", calls), recompute_log_probs=False
    )
    sync = ["actor.send_weights", "generator.receive_weights"]
    answer = ["generator.generate_sequences"]
    for name in ("generate_sequences", "compute_log_prob", "generate_sequences"):
        separate.call(METHODS[name], batch(0), {})
    assert calls == [*sync, *answer, "actor.compute_log_prob", *answer]
    calls.clear()
    separate.call(METHODS["update_actor"], batch(0), {})
    found = separate.call(METHODS["generate_sequences"], batch(0), {"greedy": True})
    assert calls == ["actor.update_actor", *sync, *answer]
    assert isinstance(found, Batch)
    assert found["weights_version"].tolist() == [2, 2, 2]


class Twice(Actor):
    """An actor with an update of its own."""

    @register(transfer=DP_METRIC)
    def learn_twice(self, rows: TensorDict) -> dict[str, float]:
        del rows
        return {}


def test_weights_go_after_a_method_of_ones_own_too() -> None:
    calls: list[str] = []
    separate = SeparateGeneration(
        Noting("actor", calls), Noting("generator", calls), recompute_log_probs=False
    )
    separate.call(METHODS["generate_sequences"], batch(0), {})
    calls.clear()
    separate.call(methods_of(Twice)["learn_twice"], batch(0), {})
    separate.call(METHODS["generate_sequences"], batch(0), {})
    assert calls[:2] == ["actor.learn_twice", "actor.send_weights"]


@pytest.mark.parametrize(
    ("rows", "named"),
    [((batch(0), True), {}), ((Path("d"),), {}), ((), {"rows": batch(0)})],
    ids=["two", "no batch", "by name"],
)
def test_a_remote_call_takes_its_rows_by_position(rows: tuple[object, ...], named: dict[str, object]) -> None:
    calls: list[str] = []
    actor = Actor().bound(Noting("actor", calls))
    with pytest.raises(TypeError, match=r"Actor\.generate_sequences: .*Its parameters are rows, "):
        actor.generate_sequences(*rows, **named)  # type: ignore[arg-type]
    assert calls == []
    actor.generate_sequences(batch(0), greedy=True)
    assert calls == ["actor.generate_sequences"]


def test_log_probs_are_the_actors_where_it_wants_so() -> None:
    calls: list[str] = []
    actor = Noting("actor", calls)
    separate = SeparateGeneration(actor, Noting("generator", calls), recompute_log_probs=True)
    separate.call(METHODS["generate_sequences"], batch(0), {})
    assert calls[-2:] == ["generator.generate_sequences", "actor.read_log_prob"]
    assert actor.given == {"keep": True}, "an update of these rows follows"
    separate.call(METHODS["generate_sequences"], batch(0), {"sampling": Sampling(temperature=0.5)})
    assert actor.given == {"keep": True, "temperature": 0.5}, "as the actor's own workers recompute them"
    separate.call(METHODS["generate_sequences"], batch(0), {"greedy": True})
    assert calls[-1] == "generator.generate_sequences"


@pytest.mark.parametrize("kind", [GenerationAhead, PartialGeneration])
def test_answers_that_are_drawn_ahead_take_no_sampling_of_a_call(
    kind: type[GenerationAhead | PartialGeneration],
) -> None:
    calls: list[str] = []
    ahead = kind(Noting("actor", calls), Noting("generator", calls), recompute_log_probs=False)
    given = {"sampling": Sampling(temperature=0.5)}
    with pytest.raises(ValueError, match=r"generate_sequences\(sampling=\.\.\.\): .*drawn before it"):
        ahead.call(METHODS["generate_sequences"], batch(0), given)
    assert calls == []
    ahead.is_validating = lambda: True
    ahead.call(METHODS["generate_sequences"], batch(0), given)
    assert calls[-1] == "generator.generate_sequences"


def test_a_call_returns_the_rows_of_the_call_before() -> None:
    calls: list[str] = []
    generator = Noting("generator", calls)
    ahead = GenerationAhead(Noting("actor", calls), generator, recompute_log_probs=False)
    seen = []
    for first in (0, 10, 20):
        found = ahead.call(METHODS["generate_sequences"], batch(first), {})
        assert isinstance(found, Batch)
        seen.append((found["response_ids"][:, 0] % (1 << 61)).tolist())
        seen.append([ahead.staleness])
        ahead.call(METHODS["update_actor"], batch(first), {})
        ahead.is_validating = lambda: True
        now = ahead.call(METHODS["generate_sequences"], batch(70, rows=2), {})
        assert isinstance(now, Batch)
        assert now["response_ids"][:, 0].tolist() == [70, 71]
        ahead.is_validating = lambda: False
        ahead.end_step()
    assert seen == [[0, 1, 2], [0], [0, 1, 2], [1], [10, 11, 12], [1]]
    assert generator.row_ids[0] != generator.row_ids[1]
    with pytest.raises(ValueError, match="a batch of 2 rows follows one of 3"):
        ahead.call(METHODS["generate_sequences"], batch(30, rows=2), {})


def test_a_generator_is_its_actors_copy() -> None:
    actor = Actor(path="somewhere", seed=3, recompute_log_probs=True)
    generator = Generator.of(actor)
    assert (generator.path, generator.actor.path, generator.actor.seed) == ("somewhere", "somewhere", 3)
    assert not generator.actor.recompute_log_probs
    assert not generator.weights_change


def test_a_generators_layout_is_refused_as_its_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(actor: Actor, layout: ParallelLayout, settings: Settings) -> None:
        raise ValueError(f"path={actor.path}: t={layout.t} under {settings.generator}")

    monkeypatch.setattr(Actor, "check_generation", refuse)
    with pytest.raises(ValueError, match=r"^actor\.path=somewhere: t=2 under native$"):
        Generator.of(Actor(path="somewhere")).check_layout(ParallelLayout(t=2), Settings())


def built(role: R) -> R:
    """The role on a device of its own."""
    role.build(Worker(0, ParallelLayout(), torch.device("cpu"), None, None, settings=Settings()))
    return role


def both() -> tuple[Actor, Generator]:
    """An actor whose seed is not that by default, and its copy."""
    sampling = Sampling(max_new_tokens=20, stop_token_ids=tuple(range(60)))
    actor = Actor(path=EMBEDDED, seed=3, sampling=sampling)
    return built(actor), built(Generator.of(actor))


def prompts(count: int) -> TensorDict:
    columns = {
        "prompt_ids": torch.arange(5, 5 + count)[:, None].expand(count, 3).clone(),
        "prompt_mask": torch.ones(count, 3, dtype=torch.bool),
        "row_ids": torch.arange(count),
        NUMBERS: torch.arange(count),
        "rows": NonTensorStack(*[{"prompt": "go"}] * count),
    }
    return TensorDict(columns, batch_size=[count])


def on(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str | None]:
    """What an environment says, always."""
    del responses, rows
    return ["<user>on"] * len(prompts)


OTHERWISE = Sampling(max_new_tokens=5, temperature=0.3)
"""How the answers of one call are drawn, and no others."""


def test_one_call_draws_otherwise() -> None:
    """By what it is given, on the same engine, and the calls after it by the actor's own again."""
    rows, (actor, _) = prompts(4), both()
    before = actor.generate_sequences(rows)
    found = actor.generate_sequences(rows, sampling=OTHERWISE)
    alone = built(Actor(path=EMBEDDED, seed=3, sampling=OTHERWISE)).generate_sequences(rows)
    for name in ("response_ids", "log_probs", "row_truncated"):
        assert torch.equal(found[name], alone[name])
        assert torch.equal(actor.generate_sequences(rows)[name], before[name])
    with pytest.raises(ValueError, match=r"max_new_tokens=21, and the actor has room for answers of 20 tok"):
        actor.generate_sequences(rows, sampling=Sampling(max_new_tokens=21))


@pytest.mark.parametrize(
    "how", [{}, {"greedy": True}, {"environment": Environment(function=on)}, {"sampling": OTHERWISE}]
)
def test_a_copy_answers_as_its_actor(how: dict[str, Any]) -> None:
    rows, (actor, copy) = prompts(4), both()
    wanted, found = (role.generate_sequences(rows, **how)["response_ids"] for role in (actor, copy))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("how", [{}, {"greedy": True}, {"sampling": OTHERWISE}])
def test_a_copy_answers_as_its_actor_in_parts(how: dict[str, Any]) -> None:
    rows, (actor, copy) = prompts(4), both()
    copy.start_sequences(rows, parts=2, **how)
    parts = [copy.next_sequences(rows[:2]) for _ in range(2)]
    numbers, found = (torch.cat([part[name] for part in parts]) for name in (NUMBERS, "response_ids"))
    assert torch.equal(found[numbers.argsort()], actor.generate_sequences(rows, **how)["response_ids"])


def test_a_copy_goes_on_as_its_actor_would() -> None:
    rows, (actor, copy) = prompts(4), both()
    found = copy.carry_sequences(rows, carry=Carry(version=0, max_staleness=2))
    assert torch.equal(found["response_ids"], actor.generate_sequences(rows)["response_ids"])


def test_a_copy_makes_room_and_comes_back() -> None:
    rows, (_, copy) = prompts(4), both()
    wanted, engine = copy.generate_sequences(rows)["response_ids"], copy.engine
    assert isinstance(engine, FSDPEngine)
    engine._offloaded.frees = True  # as on a GPU
    here = engine.memory()["parameters"]
    copy.offload()
    assert copy.reload_bytes() == here > 0
    copy.reload()
    assert copy.reload_bytes() == 0
    assert torch.equal(copy.generate_sequences(rows)["response_ids"], wanted)


@dataclass
class LastFirst(Noting):
    """A generator that answers its last rows first, as many at a time as there are parts of them."""

    left: list[int] = field(default_factory=list)

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        assert batch is None or "row_numbers" in batch
        found = super().call(method, batch, arguments)
        if batch is not None and method.name == "start_sequences":
            assert arguments == {"greedy": True, "parts": 3}
            self.left = batch["row_numbers"].tolist()[::-1]
        if batch is None or method.name != "next_sequences":
            return found
        share = method.transfer.distribute(ParallelLayout(), Inputs(batch, arguments))[0].batch
        now, self.left = torch.tensor(self.left[: len(share)]), self.left[len(share) :]
        return Batch.of(dict.fromkeys(ANSWERS, 10 * now) | {"row_numbers": now})


def test_answers_in_parts_have_no_environment() -> None:
    generator = LastFirst("generator", [])
    separate = GenerationInParts(Noting("actor", []), generator, recompute_log_probs=False, parts=3)
    given = {"environment": Environment(function="a_module.speaks")}
    with pytest.raises(ValueError, match=r"environment=...\): this strategy hands answers on as they end"):
        separate.call(METHODS["generate_sequences"], batch(70, rows=7), given)


@pytest.mark.parametrize("how", [{}, {"environment": None}], ids=["left out", "none"])
def test_answers_in_parts_have_the_order_of_the_batch(how: dict[str, object]) -> None:
    calls: list[str] = []
    generator = LastFirst("generator", calls)
    separate = GenerationInParts(Noting("actor", calls), generator, recompute_log_probs=False, parts=3)
    found = separate.call(METHODS["generate_sequences"], batch(70, rows=7), {"greedy": True, **how})
    assert isinstance(found, Batch)
    asked = ["generator.start_sequences", *["generator.next_sequences"] * 3]
    assert calls == ["actor.send_weights", "generator.receive_weights", *asked]
    assert found["row_ids"].tolist() == list(range(70, 77))
    assert found["response_ids"].tolist() == list(range(0, 70, 10))
    assert found["weights_version"].tolist() == [1] * 7


def test_log_probs_of_what_is_ahead_are_the_actors_too() -> None:
    calls: list[str] = []
    ahead = GenerationAhead(Noting("actor", calls), Noting("generator", calls), recompute_log_probs=True)
    ahead.call(METHODS["generate_sequences"], batch(0), {})
    assert calls[-1] == "actor.read_log_prob"


def test_a_single_answer_is_no_part() -> None:
    calls: list[str] = []
    separate = GenerationInParts(Noting("actor", []), Noting("generator", calls), recompute_log_probs=False)
    separate.call(METHODS["generate_sequences"], batch(70, rows=1), {})
    assert calls == ["generator.receive_weights", "generator.generate_sequences"]


@pytest.mark.parametrize(
    "strategy",
    [OpenRLHF(), OneStepOff(), OneStepOff(max_staleness=2), Pipelined()],
    ids=["openrlhf", "ahead", "partial", "pipelined"],
)
def test_log_probs_are_the_actors_under_every_strategy(strategy: OpenRLHF) -> None:
    workers = Noting("actor", []), Noting("generator", [])
    assert strategy.make_generation(*workers, recompute_log_probs=True).recompute_log_probs


def test_its_vllm_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asleep it would ask for weights before its next answers, and an actor sends changed ones only."""
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("rlhf_lightning.workers.settings.require_vllm", lambda: None)
    monkeypatch.setattr(Actor, "generator_over", lambda _, *given: asked.append(given))
    settings, cpu = Settings(generator="vllm", vllm=VLLM(kv_cache_gib=0.5)), torch.device("cpu")
    link = Link(cast(ProcessGroup, None), 0, cpu)
    Generator.of(Actor()).build(Worker(0, ParallelLayout(), cpu, None, None, settings=settings, link=link))
    assert settings.vllm.sleep
    assert asked == [(LinkedSource(link), VLLM(kv_cache_gib=0.5, sleep=False))]


def test_a_generation_is_gone_on_with_to_its_end() -> None:
    ended: list[str] = []

    def answers(fail_at: int) -> Iterator[TensorDict]:
        try:
            for number in range(3):
                if number == fail_at:
                    raise ValueError("broken on purpose")
                yield TensorDict({"x": torch.tensor([number])}, batch_size=[1])
        finally:
            ended.append("ended")

    underway = Underway()
    underway.begin(answers(fail_at=9), parts=3)
    assert [underway.more()["x"].item() for _ in range(2)] == [0, 1]
    assert not ended
    assert underway.more()["x"].item() == 2
    assert ended == ["ended"]
    underway.begin(answers(fail_at=1), parts=3)
    underway.more()
    with pytest.raises(ValueError, match="on purpose"):
        underway.more()
    with pytest.raises(RuntimeError, match="the part before this one failed"):
        underway.more()
