"""Columns that an algorithm and its data do not agree about, before any worker starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor

from rlhf_lightning import algos
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import DPO, GRPO, KTO, PPO, SFT, ProcessRewardModel, RewardModel, SafeRLHF, SimPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import (
    CompletionData,
    MixedData,
    PreferenceData,
    PromptData,
    StepData,
    TaskData,
    TextData,
    UnpairedData,
)
from rlhf_lightning.functional import Counts, KTOLoss, PairLoss, PairwiseLoss, SFTLoss
from rlhf_lightning.running import KLPenalty
from rlhf_lightning.workers import Cost, Reward
from tests.unit.algos.short import refusal


@dataclass(frozen=True, kw_only=True)
class Margins(PairLoss):
    """Reads them whatever its options say, since it has none."""

    columns = ("margins",)

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        del counts
        return (outputs["values"].sum(dim=1) * rows["margins"]).sum(), {}


class Ranking(RewardModel):
    """Learns by a loss of another field's name."""

    loss: Margins = field(default_factory=Margins)  # type: ignore[assignment]
    ranking: PairwiseLoss | None = None
    """The loss in its place."""


class Measuring(RewardModel):
    """Which may make margins of its own, or read them."""

    def step(self, batch: Batch) -> Metrics:
        return super().step(batch)


def told(algorithm: RLHFAlgorithm, root: Path, *, margin_field: str | None) -> str:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "by": 1.5}] * 2
    data = PreferenceData.from_rows(rows, batch_size=2, margin_field=margin_field)
    return refusal(algorithm, root, data=data)


READS = PairwiseLoss(margin=True)


def test_margins_that_are_read_are_in_the_data(tmp_path: Path) -> None:
    assert told(RewardModel(loss=READS), tmp_path, margin_field="by") == "started"
    assert told(Measuring(loss=READS), tmp_path, margin_field=None) == "started"
    assert told(RewardModel(loss=READS), tmp_path, margin_field=None) == (
        "loss: reads the margins, by how much each chosen answer is better, and PreferenceData gives none. "
        "Type --data.margin_field FIELD, or --algo.loss.margin false."
    )


def test_a_loss_is_asked_for_the_option_that_it_has(tmp_path: Path) -> None:
    said = "reads the margins, by how much each chosen answer is better, and PreferenceData gives none."
    typed = "Type --data.margin_field FIELD"
    assert told(Ranking(), tmp_path, margin_field=None) == f"loss: {said} {typed}."
    found = told(Ranking(loss=PairwiseLoss(), ranking=READS), tmp_path, margin_field=None)  # type: ignore[arg-type]
    assert found == f"ranking: {said} {typed}, or --algo.ranking.margin false."


@pytest.mark.parametrize(
    ("algorithm", "margin_field", "said"),
    [
        (RewardModel(), "by", "RewardModel does not read the margins. Type --algo.loss.margin true."),
        (DPO(), "by", "DPO does not read the margins. Leave it out."),
        (RewardModel(), None, ""),
        (RewardModel(loss=READS), "by", ""),
        (Measuring(), "by", ""),
    ],
)
def test_margins_that_nothing_reads_are_said(
    algorithm: RLHFAlgorithm,
    margin_field: str | None,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert told(algorithm, tmp_path, margin_field=margin_field) == "started"
    found = [record.getMessage() for record in caplog.records if "margin" in record.getMessage()]
    assert found == ([f"data.margin_field: {said}"] if said else [])


def test_margins_are_those_of_the_rows_that_are_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def begun(algorithm: RLHFAlgorithm, margin_field: str | None) -> str:
        rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "by": 1.5}] * 2
        main = PreferenceData.from_rows(rows, batch_size=2, margin_field=margin_field)
        ptx = TaskData(batch_size=1, num_rows=1, num_val_rows=0, completions=True)
        return refusal(algorithm, tmp_path, data=MixedData(main=main, ptx=ptx))

    said = "PreferenceData gives none. Type --data.main.margin_field FIELD"
    assert said in begun(RewardModel(loss=READS), None)
    with caplog.at_level(logging.WARNING):
        assert begun(RewardModel(), "by") == "started"
    assert "data.main.margin_field: RewardModel does not read the margins." in caplog.text


def test_the_embedded_task_is_asked_for_its_answers(tmp_path: Path) -> None:
    def begun(algorithm: RLHFAlgorithm, *, completions: bool = False) -> str:
        data = TaskData(batch_size=2, num_rows=2, num_val_rows=0, completions=completions)
        return refusal(algorithm, tmp_path, data=data)

    others = "--data completiondata, preferencedata, unpaireddata or stepdata, with the fields that they need"
    assert begun(SFT()) == (
        "SFT learns from the columns response_ids, and TaskData gives no response_ids. "
        f"Type --data.completions true, or try other data: {others}."
    )
    assert begun(SFT(), completions=True) == "started"
    assert begun(KTO()).endswith(f"gives no labels, response_ids. Try other data: {others}.")


@pytest.mark.parametrize("make", [PPO, partial(SafeRLHF, cost=Cost(functions="length"))])
def test_a_horizon_is_long_enough_for_a_batch(make: Callable[..., PPO], tmp_path: Path) -> None:
    def begun(target: float | None, horizon: float) -> str:
        data = TaskData(batch_size=8, num_rows=8, num_val_rows=0)
        return refusal(make(kl=KLPenalty(target=target, horizon=horizon)), tmp_path, data=data)

    assert begun(0.1, 1.6) == (
        "adapted_kl_coef(horizon=1.6, num_rows=8): one iteration with little divergence would take the whole "
        "coefficient away, or more. Try a horizon of at least 8, at which it changes by 20% an iteration at "
        "most."
    )
    assert begun(0.1, 8.0) == "started"
    assert begun(None, 1.6) == "started"


class Writing(SFT):
    """Whose step makes a loss of pairs."""

    needs_pairs = True


class SelfPlay(DPO):
    """Who pairs the given answers with drawn ones."""

    draws = True


def test_who_learns_from_pairs_is_known_by_the_losses() -> None:
    options = {"SafeRLHF": {"cost": Cost(functions="length")}}
    made = {name: getattr(algos, name)(**options.get(name, {})) for name in algos.__all__}
    needing = {"CostModel", "DPO", "RewardModel", "SimPO"}
    assert {name for name, algorithm in made.items() if algorithm.needs_pairs} == needing
    assert {name for name, algorithm in made.items() if algorithm.in_pairs} == needing | {"OnlineDPO"}
    assert Writing().needs_pairs
    assert (SelfPlay().in_pairs, SelfPlay().needs_pairs) == (True, False)


class Playing(DPO):
    """Forgets to say that it draws."""

    def step(self, batch: Batch) -> Metrics:
        raise NotImplementedError


def test_who_pairs_given_answers_with_drawn_ones_is_told_how_to_say_so(tmp_path: Path) -> None:
    data = TaskData(batch_size=2, num_rows=2, num_val_rows=0, completions=True)
    told = "Where its step draws the other half of each pair, write `draws = True` in the class."
    assert refusal(Playing(), tmp_path, data=data).endswith(f"fields that it needs. {told}")
    assert refusal(DPO(), tmp_path, data=data).endswith("fields that it needs.")


PAIR: dict[str, object] = {"prompt": "a", "chosen": "b", "rejected": "c"}
ROWS = [PAIR | {"response": "b", "label": n < 4, "steps": ["b"], "labels": [1]} for n in range(8)]
LEARNERS: list[tuple[Callable[..., RLHFAlgorithm], type[PromptData], str]] = [
    (DPO, PreferenceData, "pairs"),
    (SimPO, PreferenceData, "pairs"),
    (RewardModel, PreferenceData, "pairs"),
    (KTO, UnpairedData, "rows"),
    (SFT, CompletionData, "rows"),
    (ProcessRewardModel, StepData, "rows"),
]


@pytest.mark.parametrize(("make", "kind", "unit"), LEARNERS)
def test_a_step_takes_no_more_given_answers_than_an_iteration_reads(
    make: Callable[..., RLHFAlgorithm], kind: type[PromptData], unit: str, tmp_path: Path
) -> None:
    def begun(size: int) -> str:
        return refusal(make(mini_batch_size=size), tmp_path, data=kind.from_rows(ROWS, batch_size=4))

    assert begun(5) == (
        f"mini_batch_size=5: an iteration reads 4 {unit}, data.batch_size, and no step takes more. "
        "Type --data.batch_size 5, or --algo.mini_batch_size 0 for steps of 4."
    )
    assert [begun(size) for size in (0, 3, 4)] == ["started"] * 3


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_may_take_more_than_an_iteration_of_the_embedded_task(tmp_path: Path, *, mixed: bool) -> None:
    main, ptx = (TaskData(batch_size=4, num_rows=8, num_val_rows=0, completions=True) for _ in range(2))
    data = MixedData(main=main, ptx=ptx) if mixed else main
    assert refusal(SFT(mini_batch_size=5), tmp_path, data=data) == "started"


def test_second_rows_are_checked_against_the_model(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "abc"}\n')

    def begun(tokens: int) -> str:
        text = TextData(path=str(file), batch_size=1, block_tokens=tokens)
        main = TaskData(batch_size=4, num_rows=8, num_val_rows=0)
        return refusal(PPO(ptx_loss=SFTLoss(coef=0.1)), tmp_path, data=MixedData(main=main, ptx=text))

    assert begun(513).startswith("data.ptx.block_tokens=513: the model has 512 positions. Try --data.ptx.")
    assert begun(512) == "started"


@pytest.mark.parametrize("mixed", [False, True])
def test_a_batch_holds_answers_to_other_prompts(tmp_path: Path, *, mixed: bool) -> None:
    """Alone a row would be learned from without the baseline, in every step."""

    def begun(size: int, *, from_pairs: bool = False, baseline: bool = True) -> str:
        data = UnpairedData.from_rows(ROWS, batch_size=size, from_pairs=from_pairs)
        ptx = TaskData(batch_size=1, num_rows=1, num_val_rows=0, completions=True)
        both = MixedData(main=data, ptx=ptx) if mixed else data
        return refusal(KTO(loss=KTOLoss(baseline=baseline)), tmp_path, data=both)

    assert begun(1) == (
        f"{'data.main' if mixed else 'data'}.batch_size=1: KTO compares with answers to other prompts, and "
        "the rows of one prompt may fill a batch. Try 16, or --algo.loss.baseline false."
    )
    assert ".batch_size=2: KTO compares" in begun(2, from_pairs=True)
    assert begun(2) == begun(3, from_pairs=True) == begun(1, baseline=False) == "started"


def test_a_loss_without_weight_teaches_nothing(tmp_path: Path) -> None:
    data = CompletionData.from_rows(ROWS, batch_size=4)
    told = refusal(SFT(loss=SFTLoss(coef=0.0)), tmp_path, data=data)
    assert told == "loss.coef=0.0: nothing would be learned. Try 1.0."


class Collecting(SFT):
    """Which may join the rows of several iterations before a step."""

    def step(self, batch: Batch) -> Metrics:
        return super().step(batch)


def test_steps_of_other_rows_are_not_those_of_an_iteration(tmp_path: Path) -> None:
    data = CompletionData.from_rows(ROWS, batch_size=4)
    assert refusal(Collecting(mini_batch_size=5), tmp_path, data=data) == "started"
    prompts = PromptData.from_rows(ROWS, batch_size=4)
    grpo = GRPO(mini_batch_size=8, group_size=2, reward=Reward(functions="length"))
    assert refusal(grpo, tmp_path, data=prompts) == "started"


def test_a_smaller_batch_of_the_embedded_task_needs_no_other_option(tmp_path: Path) -> None:
    """configs/embedded.yaml has mini-batches of 64."""
    data = TaskData(batch_size=16, num_rows=16, num_val_rows=0, completions=True)
    assert refusal(SFT(mini_batch_size=64), tmp_path, data=data) == "started"
