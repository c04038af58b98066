"""Distillation: what is compared, from whose answers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.algos import Distillation
from rlhf_lightning.callbacks import SampledValidation, SecondReward
from rlhf_lightning.controller import Batch, Metrics, WorkerError
from rlhf_lightning.data import CompletionData, PreferenceData, PromptData, TaskData, prompt_columns
from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.functional import Aggregation, DistillationLoss
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reference, Role
from tests.unit.algos.small import built, run

FAST = OptimizerSpec(lr=3e-3)
COLUMNS = ("prompt_ids", "prompt_mask", "response_ids", "response_mask")


def student(path: str, temperature: float = 1.0) -> Actor:
    return Actor(path=path, optimizer=FAST, sampling=Sampling(max_new_tokens=6, temperature=temperature))


def another(path: str) -> Reference:
    """A model of the same configuration with other weights."""
    return Reference(path=path, init_seed=7)


def data(**options: object) -> TaskData:
    return TaskData(batch_size=6, num_rows=24, num_val_rows=6, **options)  # type: ignore[arg-type]


class Noting(Distillation):
    """Keeps the rows and both models of the first iteration."""

    def step(self, batch: Batch) -> Metrics:
        """Copy the weights before they change."""
        if self.global_step == 0:
            self.models = {name: weights_of(role) for name, role in built(self).items() if role.path}
        return super().step(batch)

    def taught(self, batch: Batch) -> Batch:
        found = super().taught(batch)
        if self.global_step == 0:
            self.seen = {name: found[name] for name in (*COLUMNS, "candidate_ids")}
        return found


def weights_of(role: Role) -> dict[str, Tensor]:
    with cast(FSDPEngine, role.engine).gathered() as model:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def said(path: str, weights: dict[str, Tensor], seen: dict[str, Tensor], heat: float) -> Tensor:
    """The distributions of a plain model in each response token's place: [tokens, words]."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    model.load_state_dict(weights)
    found = []
    for row in range(len(seen["prompt_ids"])):
        prompt = seen["prompt_ids"][row][seen["prompt_mask"][row]]
        response = seen["response_ids"][row][seen["response_mask"][row]]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0]
        found.append((logits[len(prompt) - 1 : -1] / heat).softmax(-1))
    return torch.cat(found).double()


@pytest.mark.parametrize(("size", "heat"), [(3, 1.0), (20, 0.7)])
def test_the_loss_is_the_divergence_of_the_two_models(model: str, size: int, heat: float) -> None:
    loss = DistillationLoss(beta=0.3)
    algorithm = Noting(actor=student(model, heat), teacher=another(model), loss=loss, candidates=size)
    kept = run(algorithm, data(), steps=1)
    p, q = (said(model, algorithm.models[name], algorithm.seen, heat) for name in ("teacher", "actor"))
    mask = algorithm.seen["response_mask"]
    words = p.topk(size, dim=-1).indices
    assert torch.equal(algorithm.seen["candidate_ids"][mask].long(), words)
    assert (algorithm.seen["candidate_ids"][~mask] == 0).all()
    coarse = [
        torch.cat([x.gather(-1, words), 1 - x.gather(-1, words).sum(-1, keepdim=True)], -1) for x in (p, q)
    ]
    mixed = 0.3 * coarse[0] + 0.7 * coarse[1]
    kls = [(x * (x / mixed).log()).sum(-1).mean() for x in coarse]
    numbers = kept.numbers[0]
    assert numbers["distillation/loss"] == pytest.approx(float(0.3 * kls[0] + 0.7 * kls[1]), rel=1e-4)
    assert numbers["distillation/rest"] == pytest.approx(float(coarse[0][:, -1].mean()), rel=1e-4)
    assert numbers["response/length_mean"] == pytest.approx(float(mask.sum(1).float().mean()))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_student_comes_nearer(model: str, beta: float) -> None:
    algorithm = Distillation(actor=student(model), teacher=another(model), loss=DistillationLoss(beta=beta))
    numbers = run(algorithm, data(), steps=8).numbers
    for name in ("forward_kl", "reverse_kl"):
        assert numbers[-1][f"distillation/{name}"] < 0.7 * numbers[0][f"distillation/{name}"]


class Counting(Distillation):
    """Counts the iterations in which it answers."""

    drawn = 0

    def rollout_metrics(self, batch: Batch) -> dict[str, float]:
        self.drawn += 1
        return super().rollout_metrics(batch)


@pytest.mark.parametrize(("given", "read"), [(0.0, 0), (0.25, 2), (0.7, 5), (1.0, 8)])
def test_given_answers_are_read_in_their_share_of_iterations(given: float, read: int, model: str) -> None:
    algorithm = Counting(actor=student(model), teacher=another(model), given=given)
    kept = run(algorithm, data(completions=True), steps=8)
    assert algorithm.drawn == 8 - read
    assert all(numbers["distillation/loss"] > 0 for numbers in kept.numbers)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_without_answers_of_its_own_the_loss_is_validated(
    mode: Aggregation, model: str, tmp_path: Path
) -> None:
    """In batches of unequal answers, as in one."""
    loss = DistillationLoss(aggregation=mode)
    rows = [{"prompt": "Say it: ", "response": "a" * (1 + n)} for n in range(12)]

    def found(size: int) -> dict[str, float]:
        algorithm = Distillation(actor=student(model), teacher=another(model), given=1.0, loss=loss)
        settings = {"logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
        trainer = pl.Trainer(strategy=Local(), accelerator="cpu", **settings)  # type: ignore[arg-type]
        batches = CompletionData.from_rows(rows, batch_size=size, val_rows=5)
        (numbers,) = trainer.validate(algorithm, datamodule=batches, verbose=False)
        return {name: float(value) for name, value in numbers.items()}

    whole = found(5)
    assert set(whole) == {"val/loss", "val/forward_kl", "val/reverse_kl", "val/rest"}
    assert found(2) == pytest.approx(whole, rel=1e-4)


PAIRS = PreferenceData.from_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8, batch_size=4)


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({"teacher": Reference()}, data(), r"Type --algo\.teacher\.path DIRECTORY"),
        ({"candidates": 10_000}, data(), r"candidates=10000: the models have 264 words\. Try 64\."),
        ({"given": 0.5}, data(), "learns from the columns response_ids, and TaskData gives no"),
        ({"given": 1.0}, PAIRS, "Distillation imitates every answer, and PreferenceData gives"),
    ],
)
def test_what_cannot_be_learned_is_refused(
    options: dict[str, object], rows: PromptData, message: str, model: str
) -> None:
    algorithm = Distillation(**{"actor": student(model), "teacher": another(model), **options})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        run(algorithm, rows)


@pytest.mark.parametrize(
    ("options", "message"), [({"candidates": 0}, "are words"), ({"given": -0.1}, "share of the iterations")]
)
def test_impossible_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distillation(**options)  # type: ignore[arg-type]
    Distillation(candidates=1)


def test_models_of_few_words_are_told_how_many(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_lightning.algos.distillation.num_tokens", lambda _: 33)
    with pytest.raises(ValueError, match=r"^candidates=64: the models have 33 words\. Try 33\.$"):
        run(Distillation(actor=student(model), teacher=another(model)), data())


def test_only_words_that_both_models_have_are_compared(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here as if one of the two had the first hundred alone."""
    monkeypatch.setattr("rlhf_lightning.algos.distillation.num_tokens", lambda _: 100)
    algorithm = Noting(actor=student(model), teacher=another(model), candidates=20)
    run(algorithm, data(), steps=1)
    assert algorithm.seen["candidate_ids"].max() < 100


def test_prompts_without_answers_suffice(model: str) -> None:
    """Nothing scores what is drawn in training, so nothing has to be known of it."""
    rows = PromptData.from_rows([{"prompt": f"{n}: "} for n in range(8)], batch_size=4)
    run(Distillation(actor=student(model), teacher=another(model)), rows, steps=1)
    given = [{"prompt": f"{n}: ", "response": "yes"} for n in range(8)]
    both = CompletionData.from_rows(given, batch_size=4)
    run(Distillation(actor=student(model), teacher=another(model), given=0.5), both)


def test_given_answers_that_nothing_reads_may_be_long(model: str) -> None:
    rows = CompletionData.from_rows(
        [{"prompt": f"{n}: ", "response": "a" * 600} for n in range(8)], batch_size=4, max_response_tokens=700
    )
    run(Distillation(actor=student(model), teacher=another(model)), rows, steps=1)
    with pytest.raises(ValueError, match="longest prompt and response"):
        run(Distillation(actor=student(model), teacher=another(model), given=0.5), rows, steps=1)


def test_a_judge_of_held_out_answers_alone_is_tried_on_those(model: str) -> None:
    rows = PromptData.from_rows([{"prompt": f"{n}: "} for n in range(8)], batch_size=4, val_rows=4)
    with pytest.raises(ValueError, match="exact_match compares with the row's field 'answer'"):
        run(Distillation(actor=student(model), teacher=another(model)), rows)


@pytest.mark.parametrize("callback", [SampledValidation(samples=2), SecondReward(functions="length")])
def test_callbacks_that_score_are_refused_where_nothing_answers(callback: pl.Callback, model: str) -> None:
    algorithm = Distillation(actor=student(model), teacher=another(model), given=1.0)
    trainer = pl.Trainer(strategy=Local(), accelerator="cpu", max_steps=1, callbacks=[callback], logger=False)
    with pytest.raises(ValueError, match=type(callback).__name__):
        trainer.fit(algorithm, datamodule=data(completions=True))


class Hinted(Distillation):
    """The teacher is the student's average, and reads the answer before the question."""

    def taught(self, batch: Batch) -> Batch:
        """What it says of the same responses after other prompts."""
        rows = cast("list[dict[str, object]]", batch.objects("rows"))
        hints = prompt_columns([f"{row['answer']}{row['prompt']}" for row in rows], self.tokenizer)
        names = ["candidate_ids", "candidate_ref_log_probs"]
        return batch | super().taught(batch | hints).select(names)


def test_a_student_may_be_its_own_teacher(model: str) -> None:
    plain = run(Distillation(actor=student(model), teacher=Reference(decay=0.9)), data(), steps=2)
    assert abs(plain.numbers[0]["distillation/loss"]) < 1e-6, "it begins as the student"
    assert plain.numbers[1]["distillation/loss"] >= 0
    kept = run(Hinted(actor=student(model), teacher=Reference(decay=0.9)), data(), steps=2)
    assert kept.numbers[0]["distillation/loss"] > 5e-6
    with pytest.raises(
        ValueError, match=r"^teacher\.path: there is no teacher\. .* --algo\.teacher\.decay 0"
    ):
        run(Distillation(actor=student(model)), data())


class Blind(DistillationLoss):
    """Asks for candidates that it does not read."""

    @property
    def columns(self) -> tuple[str, ...]:
        return ("candidate_ref_log_probs",)


class Foreign(Distillation):
    """Its teacher has more words than the student."""

    def taught(self, batch: Batch) -> Batch:
        """Candidates that the student does not know."""
        return super().taught(batch) | {"candidate_ids": torch.full((len(batch), 6, 64), 9999)}


class Flat(Distillation):
    """One candidate a token, without a dimension of its own."""

    def taught(self, batch: Batch) -> Batch:
        """Candidates [B, R]."""
        return super().taught(batch) | {"candidate_ids": torch.zeros(len(batch), 6, dtype=torch.int32)}


class Looking(Flat):
    """Measures the loss, and learns nothing."""

    def step(self, batch: Batch) -> Metrics:
        batch |= self.actor.generate_sequences(batch)
        return self.actor.compute_loss(self.taught(batch), loss=self.loss)


class Sparing(Distillation):
    """Asks for no candidates."""

    def taught(self, batch: Batch) -> Batch:
        return batch | self.teacher.compute_ref_candidates(batch, size=0)


@pytest.mark.parametrize(
    ("kind", "loss", "message"),
    [
        (Distillation, Blind(), "is none of its columns. Name it there too"),
        (Flat, DistillationLoss(), r"candidates of the shape \[\d+, 6\]: each token has some"),
        (Looking, DistillationLoss(), r"compute_loss: .*candidates of the shape \[\d+, 6\]: each token has"),
        (Sparing, DistillationLoss(), r"compute_ref_candidates\(size=0\): is a number of words"),
        (Foreign, DistillationLoss(), r"9999 are to be words of a model that has \d+\. Ask the other"),
    ],
)
def test_candidates_that_cannot_be_read(
    kind: type[Distillation], loss: DistillationLoss, message: str, model: str
) -> None:
    algorithm = kind(actor=student(model), teacher=another(model), loss=loss)
    with pytest.raises(WorkerError, match=message):
        run(algorithm, data())
