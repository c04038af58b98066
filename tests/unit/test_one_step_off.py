"""Losses for which answers of older weights pass for those of the present ones, or one column for two.

And what the strategy tells the generation that is ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from torch import Tensor

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO, GSPO, SFT, OnlineDPO, ReMax
from rlhf_lightning.controller import Batch, Caller, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import Counts, Loss, OffPolicyCorrection, PolicyLoss, ReinforceLoss
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local, OneStepOff, OpenRLHF
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, PartialGeneration
from tests.unit.algos.short import trainer

CORRECTION = OffPolicyCorrection()
OLDER = "so answers of older weights pass for those of the present ones."
CORRECT = "--algo.policy_loss.correction.high 2."
PRESENT_RATIO = f"has its ratio to the present weights (actor.recompute_log_probs), {OLDER}"
PRESENT = f"{PRESENT_RATIO} Type {CORRECT}"
NO_RATIO = f"policy_loss=ReinforceLoss has no ratio, {OLDER} Type"


OWN = (
    "Let its columns name rollout_log_probs, those that tokens were drawn with, and weight each token by the "
    "ratio to them."
)


@dataclass(frozen=True, kw_only=True)
class Mine(Loss):
    """Reads these columns."""

    columns: tuple[str, ...] = ()

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError


class OwnLoss(GRPO):
    """Learns from it."""

    policy_loss: Mine = field(default_factory=Mine)  # type: ignore[assignment]


def own(*columns: str, again: bool) -> OwnLoss:
    return OwnLoss(actor=drawing(again=again), policy_loss=Mine(columns=columns))


@pytest.fixture(autouse=True)
def starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise KeyError("it would start")

    monkeypatch.setattr(OpenRLHF, "_launch", start)


def drawing(*, again: bool) -> Actor:
    return Actor(sampling=Sampling(max_new_tokens=2), recompute_log_probs=again)


def begin(strategy: OpenRLHF, algorithm: RLHFAlgorithm, root: Path, *, called: str = "fit") -> None:
    """All that is done before devices start; a smaller last batch matters only to who learns from answers."""
    rows = 4 if called == "fit" and not algorithm.reads_only else 5
    data = TaskData(batch_size=2, num_rows=rows, num_val_rows=2, completions=algorithm.reads_only)
    with pytest.raises(KeyError, match="it would start"):
        getattr(trainer(strategy, root, steps=9, limit_val_batches=1), called)(algorithm, datamodule=data)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (GRPO(actor=drawing(again=False)), ""),
        (GRPO(actor=drawing(again=True), policy_loss=PolicyLoss(correction=CORRECTION)), ""),
        (GRPO(actor=drawing(again=True)), f"policy_loss=PolicyLoss {PRESENT}"),
        (GSPO(actor=drawing(again=True)), f"policy_loss=SequencePolicyLoss {PRESENT}"),
        (ReMax(actor=drawing(again=False)), f"{NO_RATIO} --algo.actor.recompute_log_probs true {CORRECT}"),
        (ReMax(actor=drawing(again=True)), f"{NO_RATIO} {CORRECT}"),
        (ReMax(actor=drawing(again=True), policy_loss=ReinforceLoss(correction=CORRECTION)), ""),
        (ReMax(actor=drawing(again=False), policy_loss=PolicyLoss()), ""),
        (OnlineDPO(actor=drawing(again=True)), ""),
        (SFT(actor=drawing(again=True)), ""),
        (own("advantages", again=False), f"policy_loss=Mine has no ratio, {OLDER} {OWN}"),
        (own("advantages", again=True), f"policy_loss=Mine has no ratio, {OLDER} {OWN}"),
        (own("advantages", "log_probs", again=True), f"policy_loss=Mine {PRESENT_RATIO} {OWN}"),
        (own("advantages", "log_probs", again=False), ""),
        (own("advantages", "rollout_log_probs", again=False), ""),
        (own("advantages", "log_probs", "rollout_log_probs", again=True), ""),
        (own("ref_log_probs", again=True), ""),
    ],
    ids=[
        "older ratio",
        "corrected",
        "present ratio",
        "of sequences",
        "no ratio",
        "no correction",
        "corrected without a ratio",
        "given a ratio",
        "another loss",
        "given answers",
        "own without a ratio",
        "own without a ratio beside the present",
        "own present ratio",
        "own older ratio",
        "own ratio to the rollout",
        "own correction",
        "own of no advantages",
    ],
)
def test_a_loss_that_takes_older_answers_for_new_ones_is_named(
    algorithm: RLHFAlgorithm, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(OneStepOff(), algorithm, tmp_path)
    found = [record.getMessage() for record in caplog.records if record.name.endswith("one_step_off")]
    assert found == ([said] if said else [])


def test_it_is_named_only_where_older_answers_are_learned_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(OpenRLHF(), GRPO(actor=drawing(again=True)), tmp_path)
    begin(OneStepOff(), GRPO(actor=drawing(again=True)), tmp_path, called="validate")
    assert "older weights" not in caplog.text
    begin(ahead := OneStepOff(max_staleness=2), GRPO(actor=drawing(again=True)), tmp_path)
    assert "older weights" in caplog.text
    assert ahead.in_flight() == {"in_flight": {}, "max_staleness": 2, "batch_size_in_flight": 2}


STARTS, REFUSED = "it would start", "7 rows ends with a batch of 1"


@pytest.mark.parametrize(
    ("steps", "limit", "drop_last", "said"),
    [
        (9, 2, False, STARTS),
        (9, 3, False, REFUSED),
        (9, 0.9, False, STARTS),
        (9, 1.0, False, REFUSED),
        (9, 1.0, True, STARTS),
        (2, 1.0, False, STARTS),
        (3, 1.0, False, REFUSED),
    ],
)
def test_a_limit_may_leave_out_the_smaller_last_batch(
    steps: int, limit: float, drop_last: bool, said: str, tmp_path: Path
) -> None:
    """Of three; Lightning rounds a share of them down."""
    run = trainer(OneStepOff(), tmp_path, steps=steps, limit_train_batches=limit)
    data = TaskData(batch_size=3, num_rows=7, num_val_rows=0, drop_last=drop_last)
    with pytest.raises((KeyError, ValueError), match=said):
        run.fit(GRPO(actor=drawing(again=False)), datamodule=data)


BOTH = ("log_probs", "rollout_log_probs", "advantages")
ONE = "compares two log-probabilities of the answers, and there is one. Try --algo.actor.recompute_log_prob"


@pytest.mark.parametrize("kind", [OneStepOff, Local])
@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (own(*BOTH, again=False), f"^policy_loss=Mine: {ONE}"),
        (
            GRPO(actor=drawing(again=False), policy_loss=PolicyLoss(correction=CORRECTION)),
            rf"^policy_loss\.correction: {ONE}",
        ),
    ],
)
def test_two_log_probabilities_that_are_one_are_refused(
    kind: type[Strategy], algorithm: RLHFAlgorithm, words: str, tmp_path: Path
) -> None:
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=0)
    with pytest.raises(ValueError, match=words):
        trainer(kind(), tmp_path).fit(algorithm, datamodule=data)


class Again(OwnLoss):
    """Its step makes the second one."""

    def step(self, batch: Batch) -> Metrics:
        """Nothing is run here."""
        raise NotImplementedError


class Given(OwnLoss):
    """Draws nothing: both are columns that its step makes."""

    needs = ("response_ids",)


@pytest.mark.parametrize("kind", [Given, Again])
def test_both_may_be_the_steps_own(kind: type[OwnLoss], tmp_path: Path) -> None:
    algorithm = kind(actor=drawing(again=False), policy_loss=Mine(columns=BOTH))
    begin(OneStepOff(), algorithm, tmp_path)


@pytest.mark.parametrize("staleness", [1, 3])
def test_the_generation_ahead_knows_its_options_and_what_a_validation_is(
    staleness: int, tmp_path: Path
) -> None:
    algorithm, strategy = GRPO(), OneStepOff(max_staleness=staleness)
    strategy.connect(algorithm)
    algorithm.trainer = run = trainer(Local(), tmp_path)
    actor, generator = cast(Caller, "actor"), cast(Caller, "generator")
    made = strategy.make_generation(actor, generator, recompute_log_probs=True)
    assert (made.actor, made.generator, made.recompute_log_probs) == (actor, generator, True)
    assert (made.max_staleness if isinstance(made, PartialGeneration) else 1) == staleness
    run.validating = True
    assert made.is_validating()
    run.training = True
    assert not made.is_validating()
