"""An actor that answers in its own way is asked to, or refused, where a copy of it generates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tensordict import TensorDict

from rlhf_lightning.algos import GRPO, SFT, RewardModel
from rlhf_lightning.controller import MICRO_DP, register
from rlhf_lightning.data import TaskData
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Colocated, OneStepOff, OpenRLHF, Pipelined
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Reward
from rlhf_lightning.workers.actor import ANSWERS, PROMPTS
from tests.unit.algos.short import trainer


@dataclass(frozen=True, kw_only=True)
class Registered(Actor):
    """Has a method in the place of `generate_sequences`."""

    @register(transfer=MICRO_DP, reads=(*PROMPTS, "row_ids"), returns=ANSWERS)
    def generate_sequences(
        self,
        rows: TensorDict,
        *,
        greedy: bool = False,
        environment: Environment | None = None,
        sampling: Sampling | None = None,
    ) -> TensorDict:
        return super().answer(rows, greedy=True, environment=environment)


@dataclass(frozen=True, kw_only=True)
class Answering(Actor):
    """Has a method in the place of `answer`."""

    def answer(self, rows: TensorDict, *, greedy: bool, environment: Environment | None = None) -> TensorDict:
        return super().answer(rows, greedy=True, environment=environment)


def told(strategy: Strategy, actor: Actor, root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a run with this actor is refused with, or that it would start."""

    def start(*_: object) -> None:
        raise ValueError("it would start")

    monkeypatch.setattr(Strategy, "_launch", start)
    algorithm = GRPO(actor=actor, reward=Reward(functions="length"), group_size=2)
    with pytest.raises(ValueError, match=r".") as error:
        trainer(strategy, root).fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=0))
    return str(error.value)


@pytest.mark.parametrize("strategy", [OpenRLHF(), OneStepOff(), Pipelined()], ids=lambda s: s.strategy_name)
def test_a_method_that_no_generator_calls_is_refused(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = told(strategy, Registered(), tmp_path, monkeypatch)
    assert said.startswith(
        f"Registered.generate_sequences is never called under {type(strategy).__name__}, where a copy of the "
        "actor generates. Override `answer` instead"
    )


@pytest.mark.parametrize(
    ("strategy", "instead"),
    [(Pipelined(), "--strategy openrlhf"), (OneStepOff(max_staleness=2), "--strategy.max_staleness 1")],
    ids=["pipelined", "partial"],
)
def test_answers_that_come_one_by_one_are_not_made_all_together(
    strategy: Strategy, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = told(strategy, Answering(), tmp_path, monkeypatch)
    assert said.startswith(
        f"{type(strategy).__name__} hands answers on as they end, and Answering.answer, which gives all of "
    )
    assert said.endswith(f"Try {instead}.")


@pytest.mark.parametrize(
    ("strategy", "actor"),
    [
        (Colocated(), Registered()),
        (OpenRLHF(), Answering()),
        (OneStepOff(), Answering()),
        (Pipelined(), Actor()),
    ],
    ids=["colocated", "openrlhf", "one-step-off", "pipelined"],
)
def test_what_is_called_may_be_ones_own(
    strategy: Strategy, actor: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(strategy, actor, tmp_path, monkeypatch) == "it would start"


def test_who_reads_answers_generates_with_the_actor_itself(tmp_path: Path) -> None:
    strategy = OpenRLHF()
    strategy.connect(SFT(actor=Registered()))
    assert [*strategy.models()] == ["actor"]
    for algorithm in (SFT(actor=Answering()), RewardModel()):
        pipelined = Pipelined()
        pipelined.connect(algorithm)
        pipelined.refuse_whole_answers(instead="another")
