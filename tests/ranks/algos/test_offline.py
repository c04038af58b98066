"""Every offline algorithm: from rows in a file to a lower loss, in this process."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from tensordict import TensorDict
from transformers import GPT2Config

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import DPO, KTO, SFT, CostModel, ProcessRewardModel, RewardModel, SimPO
from rlhf_lightning.controller import Batch
from rlhf_lightning.data import CompletionData, PreferenceData, StepData, UnpairedData
from rlhf_lightning.engines import FSDP, FSDPEngine
from rlhf_lightning.engines.head import PLAIN, Asked
from rlhf_lightning.functional import DPOLoss, KTOLoss
from rlhf_lightning.spec import OptimizerSpec
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reference, Scorer, Settings
from tests.unit.algos.short import trainer
from tests.unit.algos.small import run, write_rows
from tests.unit.pretended import GPU, pretended

NUM_ROWS = 12
FAST = OptimizerSpec(lr=3e-3)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows that serve all: the better answer is in capitals."""
    every: list[dict[str, object]] = [
        {
            "prompt": f"Question {n}: ",
            "response": "YES" if n % 2 else "no way",
            "label": bool(n % 2),
            "chosen": "YES " * (1 + n % 3),
            "rejected": "no " * (1 + n % 2),
            "chosen_safe": True,
            "rejected_safe": n % 3 == 0,
            "steps": ["RIGHT", "wrong", "RIGHT"][: 1 + n % 3],
            "labels": [1, 0, 1][: 1 + n % 3],
        }
        for n in range(NUM_ROWS)
    ]
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", every)


def actor(path: str) -> Actor:
    return Actor(path=path, optimizer=FAST)


def scorer(path: str) -> Scorer:
    return Scorer(path=path, optimizer=FAST)


Make = Callable[[str], RLHFAlgorithm]
Data = Callable[[str], pl.LightningDataModule]


def pairs(path: str) -> PreferenceData:
    safe = ("chosen_safe", "rejected_safe")
    return PreferenceData(path=path, batch_size=NUM_ROWS - 2, val_rows=2, safe_fields=safe)


CASES: dict[str, tuple[Make, Data, str]] = {
    "sft": (lambda p: SFT(actor=actor(p)), lambda p: CompletionData(path=p, batch_size=NUM_ROWS), "sft/loss"),
    "reward": (lambda p: RewardModel(reward=scorer(p)), pairs, "reward_model/loss"),
    "cost": (lambda p: CostModel(cost=scorer(p)), pairs, "cost_model/loss"),
    "process": (
        lambda p: ProcessRewardModel(reward=scorer(p)),
        lambda p: StepData(path=p, batch_size=NUM_ROWS),
        "process_reward/loss",
    ),
    "dpo": (lambda p: DPO(actor=actor(p)), pairs, "dpo/loss"),
    "ipo": (lambda p: DPO(actor=actor(p), loss=DPOLoss(kind="ipo")), pairs, "dpo/loss"),
    "hinge": (lambda p: DPO(actor=actor(p), loss=DPOLoss(kind="hinge")), pairs, "dpo/loss"),
    "smoothed": (lambda p: DPO(actor=actor(p), loss=DPOLoss(label_smoothing=0.1)), pairs, "dpo/loss"),
    "kto": (lambda p: KTO(actor=actor(p)), lambda p: UnpairedData(path=p, batch_size=NUM_ROWS), "kto/loss"),
    "simpo": (lambda p: SimPO(actor=actor(p)), pairs, "simpo/loss"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_falls_and_a_pretended_gpu_says_the_same(name: str, model: str, rows: str) -> None:
    make, data, metric = CASES[name]
    kept = run(make(model), data(rows), steps=5)
    for numbers in kept.numbers:
        assert all(math.isfinite(value) for value in numbers.values()), numbers
    losses = [numbers[metric] for numbers in kept.numbers]
    assert losses[-1] < losses[0] - 0.05 * abs(losses[0])  # found: 0.14 (SFT) to 0.97 of it
    with pretended():
        found = run(make(model), data(rows), steps=2)
    assert found.devices == {GPU}
    assert [numbers[metric] for numbers in found.numbers] == pytest.approx(losses[:2], rel=1e-3)


@pytest.mark.parametrize("baseline", [True, False])
def test_a_baseline_is_only_read(
    model: str, rows: str, monkeypatch: pytest.MonkeyPatch, *, baseline: bool
) -> None:
    """Nothing learns from its rows, so no pass over them is kept, and nobody asks for an entropy."""
    calls: list[tuple[bool, bool]] = []
    infer = FSDPEngine.infer

    def noted(
        self: FSDPEngine, rows: TensorDict, *, temperature: float, asked: Asked = PLAIN, keep: bool = False
    ) -> TensorDict:
        calls.append((asked.entropy, keep))
        return infer(self, rows, temperature=temperature, asked=asked, keep=keep)

    monkeypatch.setattr(FSDPEngine, "infer", noted)
    data = UnpairedData(path=rows, batch_size=NUM_ROWS)
    algorithm = KTO(actor=actor(model), loss=KTOLoss(baseline=baseline))
    run(algorithm, data, settings=Settings(train=FSDP(kept_tokens=10_000)))
    passes = 3 if baseline else 1
    assert calls == [(False, False)] * 2 * passes, "of the reference, and for a baseline of it and the actor"


def test_pairs_stay_together_in_mini_batches(model: str, rows: str) -> None:
    small = RewardModel(reward=scorer(model), mini_batch_size=3)
    kept = run(small, pairs(rows), steps=4)
    assert kept.numbers[-1]["reward_model/accuracy"] == 1


@pytest.mark.parametrize("name", [name for name in CASES if name not in {"ipo", "hinge", "smoothed"}])
def test_each_mini_batch_is_a_step(name: str, model: str, rows: str) -> None:
    """By the learning rate, which rises by the same with each."""
    make, data, _ = CASES[name]
    algorithm = make(model)
    ((role, learner),) = ((name, role) for name, role in algorithm.roles().items() if name != "reference")
    learner = replace(learner, optimizer=OptimizerSpec(lr=1e-6, warmup_steps=99))
    algorithm.__dict__ |= {role: learner, "mini_batch_size": 4}
    (numbers,) = run(algorithm, data(rows), steps=1).numbers
    assert round(numbers[f"{role}/lr"] * 1e8) == 3


@pytest.mark.parametrize("name", ["reward", "cost", "dpo", "simpo", "kto"])
def test_held_out_rows_are_measured_without_a_fit(name: str, model: str, rows: str, tmp_path: Path) -> None:
    unpaired = UnpairedData(path=rows, batch_size=NUM_ROWS - 2, val_rows=2, label_field="chosen_safe")
    data = unpaired if name == "kto" else pairs(rows)
    validating = trainer(Local(), tmp_path, limit_val_batches=None)
    (found,) = validating.validate(CASES[name][0](model), datamodule=data, verbose=False)
    expected = {"val/desirable_reward"} if name == "kto" else {"val/accuracy", "val/margin"}
    assert expected | {"val/loss"} <= set(found)
    assert name != "kto" or not {"val/undesirable_reward", "val/margin"} & set(found), "all rows are good"


def unpaired(path: str) -> UnpairedData:
    return UnpairedData(path=path, batch_size=NUM_ROWS)


def steps(path: str) -> StepData:
    return StepData(path=path, batch_size=NUM_ROWS)


@pytest.mark.parametrize(
    ("data", "bad"),
    [
        (pairs, "PreferenceData gives pairs"),
        (unpaired, "UnpairedData gives labels"),
        (steps, "StepData gives labels"),
    ],
)
def test_bad_answers_are_not_imitated(data: Data, bad: str, model: str, rows: str) -> None:
    with pytest.raises(
        ValueError, match=f"SFT imitates every answer, and .*{bad}.*Try --data completiondata"
    ):
        run(SFT(actor=actor(model)), data(rows))


@pytest.mark.parametrize("short", ["both", "actor", "reference"])
def test_a_mismatched_answer_is_cut_where_a_model_ends(model: str, tmp_path: Path, short: str) -> None:
    GPT2Config(
        architectures=["GPT2LMHeadModel"],
        n_positions=24,
        n_embd=32,
        n_layer=1,
        n_head=2,
        vocab_size=264,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
    ).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model) / name, tmp_path / name)
    pair: list[dict[str, object]] = [
        {"prompt": "a" * 20, "response": "x", "label": True},
        {"prompt": "b", "response": "y" * 20, "label": False},
    ]
    longer = shutil.copytree(tmp_path, tmp_path / "longer")
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(config | {"n_positions": 48}))
    ours, theirs = (str(tmp_path if short in (name, "both") else longer) for name in ("actor", "reference"))
    algorithm = KTO(actor=actor(ours), reference=Reference(path=theirs, init_seed=0))
    rows = write_rows(tmp_path / "rows.jsonl", pair)
    kept = run(algorithm, UnpairedData(path=rows, batch_size=2))
    assert algorithm.positions == 24
    assert all(math.isfinite(numbers["kto/kl"]) for numbers in kept.numbers)


class Torn(DPO):
    """Cuts mini-batches row by row."""

    def mini_batches(self, batch: Batch, *, size: int, epochs: int = 1, together: int = 1) -> Iterator[Batch]:
        return super().mini_batches(batch, size=size, epochs=epochs)


def test_pairs_that_mini_batches_tear_are_refused(model: str, rows: str) -> None:
    data = PreferenceData(path=rows, batch_size=6)
    says = r"^actor\.update_actor compares 2 neighbouring rows .* together=2\) does\.$"
    with pytest.raises(ValueError, match=says):
        run(Torn(actor=actor(model), mini_batch_size=4), data, steps=1)
    assert run(Torn(actor=actor(model), mini_batch_size=0), data, steps=1).numbers[0]["dpo/loss"] > 0


class Mismatched(KTO):
    """Notes z0, and the mean log-ratio of answers to the prompt before their own, and to their own."""

    def baseline(self, batch: Batch) -> Batch:
        """As KTO does, of rows whose prompts all differ."""
        prompts, answers = ("prompt_ids", "prompt_mask"), ("response_ids", "response_mask")
        ratios = []
        for shift in (1, 0):
            rows = batch.select(prompts) | {name: batch[name].roll(shift, dims=0) for name in answers}
            rows |= self.actor.read_log_prob(rows)
            rows |= self.reference.compute_ref_log_prob(rows)
            each = (rows["log_probs"] - rows["ref_log_probs"]) * rows["response_mask"]
            ratios.append(float(each.sum(dim=1).mean()))
        found = super().baseline(batch)
        self.found, self.ratios = found["kl_baseline"].tolist(), ratios
        return found


def test_the_baseline_is_of_answers_to_other_prompts(model: str, rows: str) -> None:
    algorithm = Mismatched(actor=actor(model), reference=Reference(init_seed=7))
    run(algorithm, unpaired(rows), steps=1)
    others, own = algorithm.ratios
    assert algorithm.found == pytest.approx([others] * NUM_ROWS, rel=1e-4)
    assert others > 0
    assert others != pytest.approx(own, rel=1e-2)


def test_where_no_row_has_another_prompt_the_baseline_is_0() -> None:
    """Such as the last row of an epoch: nothing is asked of a model."""
    ids = torch.tensor([[0, 5], [0, 5]])
    found = KTO().baseline(Batch.of({"prompt_ids": ids, "prompt_mask": ids > 0}))
    assert found["kl_baseline"].tolist() == [0, 0]
