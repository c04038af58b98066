"""The losses of the offline algorithms against TRL's trainers, which tests/parity/trl/write.py asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
)

from rlhf_lightning.functional import DPOLoss, KTOLoss, Loss, PairwiseLoss, SimPOLoss, StepLoss, kto_baseline
from tests.conftest import ROOT
from tests.parity.trl import cases

REFERENCES: dict[str, Any] = json.loads((ROOT / "tests/parity/trl/references.json").read_text())
TOLERANCE = 5e-6
"""Relative or absolute. Both sides run a float32 model of two layers, TRL with a head fused with log-softmax,
so that sums of log-probabilities up to 30 differ by up to 3e-6; found: 1e-6 in losses, 5e-7 in gradients."""

LOSSES: dict[str, dict[str, Loss]] = {
    "dpo": {
        "sigmoid": DPOLoss(beta=0.5),
        "robust": DPOLoss(kind="robust", label_smoothing=0.2),
        "ipo": DPOLoss(kind="ipo"),
        "hinge": DPOLoss(kind="hinge", beta=0.3),
        "sigmoid_normalised": DPOLoss(length_average=True, beta=2.0),
        "sigmoid_sft": DPOLoss(sft_coef=0.5),
        "sigmoid_smoothed": DPOLoss(label_smoothing=0.1, beta=0.3),
    },
    "kto": {
        "plain": KTOLoss(beta=0.3),
        "weighted": KTOLoss(desirable_weight=0.5, undesirable_weight=1.25),
        "clamped": KTOLoss(),
        "apo_zero": KTOLoss(baseline=False),
    },
    "simpo": {
        "sigmoid": SimPOLoss(beta=2.0, gamma=1.0),
        "smoothed": SimPOLoss(beta=2.5, gamma=0.5, label_smoothing=0.1),
        "sft": SimPOLoss(beta=2.0, gamma=1.0, sft_coef=0.5),
        "hinge_summed": SimPOLoss(kind="hinge", beta=0.1, gamma=0.0, length_average=False),
        "cpo": SimPOLoss(beta=0.1, gamma=0.0, length_average=False, sft_coef=1.0),
    },
    "reward_model": {
        "plain": PairwiseLoss(),
        "centred": PairwiseLoss(centering=0.05),
        "margins": PairwiseLoss(margin=True),
    },
    "process_reward": {"plain": StepLoss()},
}


class Rows:
    """Prompts and answers: padded ids, and where the tokens of the answers stand."""

    def __init__(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        both = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        lengths, width = torch.tensor([len(answer) for answer in answers]), max(map(len, answers))
        self.ids = torch.zeros(len(both), max(map(len, both)), dtype=torch.long)  # 0 pads
        for row, ids in zip(self.ids, both, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        self.mask = torch.arange(width) < lengths[:, None]
        starts = torch.tensor([len(prompt) for prompt in prompts])[:, None]
        self.places = (starts + torch.arange(width)).clamp(max=self.ids.shape[1] - 1)

    def log_probs(self, model: PreTrainedModel) -> Tensor:
        """[n, R], of other tokens where the mask is False."""
        logits: Tensor = model(input_ids=self.ids, attention_mask=(self.ids > 0).long()).logits
        every = logits[:, :-1].log_softmax(-1).gather(-1, self.ids[:, 1:, None]).squeeze(-1)
        return every.gather(1, self.places - 1)

    def hidden(self, model: PreTrainedModel) -> Tensor:
        """[n, R, hidden]."""
        body = model.model(input_ids=self.ids, attention_mask=(self.ids > 0).long())
        states: Tensor = body.last_hidden_state
        return states.gather(1, self.places[..., None].expand(-1, -1, states.shape[-1]))


Prepared = tuple[PreTrainedModel, Mapping[str, Tensor], dict[str, Tensor]]
"""The model in training, its outputs and the rows."""


def config(**more: int) -> LlamaConfig:
    return LlamaConfig.from_dict(cases.MODEL | more)


@cache
def language_model(weights: tuple[int, float]) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config())
    cases.fill(model, weights)
    return model


def pair_rows() -> Rows:
    each = cases.pairs()
    return Rows(
        [pair.prompt for pair in each for _ in range(2)],
        [answer for pair in each for answer in (pair.chosen, pair.rejected)],
    )


@cache
def preferences() -> Prepared:
    rows, model = pair_rows(), language_model(cases.POLICY)
    with torch.no_grad():
        ref_log_probs = rows.log_probs(language_model(cases.REFERENCE))
    columns = {"response_mask": rows.mask, "ref_log_probs": ref_log_probs}
    return model, {"log_probs": rows.log_probs(model)}, columns


@cache
def unpaired(swapped: bool) -> Prepared:
    """Answers with labels; with `swapped` the policy and the reference change places."""
    trained, fixed = (language_model(w) for w in (cases.POLICY, cases.REFERENCE)[:: -1 if swapped else 1])
    each = cases.answers()
    own = Rows([row.prompt for row in each], [row.answer for row in each])
    other = Rows([row.prompt for row in each], [row.other for row in each])
    with torch.no_grad():
        baseline = kto_baseline(other.log_probs(trained), other.log_probs(fixed), other.mask)
        ref_log_probs = own.log_probs(fixed)
    columns = {
        "response_mask": own.mask,
        "ref_log_probs": ref_log_probs,
        "labels": torch.tensor([row.desirable for row in each]),
        "kl_baseline": baseline.expand(len(each)),
    }
    return trained, {"log_probs": own.log_probs(trained)}, columns


@cache
def scored() -> Prepared:
    model = LlamaForSequenceClassification(config(num_labels=1))
    cases.fill(model, cases.POLICY)
    rows = pair_rows()
    margins = torch.tensor([pair.margin for pair in cases.pairs() for _ in range(2)])
    values = (rows.hidden(model) @ model.score.weight.T).squeeze(-1)
    return model, {"values": values}, {"response_mask": rows.mask, "margins": margins}


@cache
def stepped() -> Prepared:
    """TRL's head has two numbers a token, ours one: the logit is their difference."""
    model = LlamaForTokenClassification(config(num_labels=2))
    cases.fill(model, cases.POLICY)
    each = cases.stepped()
    rows = Rows([row.prompt for row in each], [list(chain(*row.steps)) for row in each])
    labels, mask = torch.full(rows.mask.shape, torch.nan), torch.zeros_like(rows.mask)
    for number, row in enumerate(each):
        ends = torch.tensor([len(step) for step in row.steps]).cumsum(0) - 1
        labels[number, ends], mask[number, ends] = torch.tensor(row.labels, dtype=torch.float32), True
    values = torch.nn.functional.linear(rows.hidden(model), model.score.weight, model.score.bias)
    columns = {"response_mask": rows.mask, "step_labels": labels, "step_mask": mask}
    return model, {"values": values[..., 1] - values[..., 0]}, columns


def prepared(section: str, case: str) -> Prepared:
    if section == "kto":
        return unpaired(case == "clamped")
    if section in ("dpo", "simpo"):
        return preferences()
    return scored() if section == "reward_model" else stepped()


def test_every_reference_is_compared() -> None:
    written = {section: set(each["cases"]) for section, each in REFERENCES.items()}
    assert written == {section: set(each) for section, each in LOSSES.items()}


@pytest.mark.parametrize(("section", "case"), [(s, c) for s, each in LOSSES.items() for c in each])
def test_parity(section: str, case: str) -> None:
    wanted, loss = REFERENCES[section]["cases"][case], LOSSES[section][case]
    model, outputs, rows = prepared(section, case)
    assert cases.checksum(model) == pytest.approx(wanted["weights"], rel=1e-7), "other weights than TRL had"
    rows = {name: rows[name] for name in ("response_mask", *loss.columns)}
    value, metrics = loss(outputs, rows, loss.count(rows))
    (gradient,) = torch.autograd.grad(value, model.get_parameter(cases.GRADIENT_OF), retain_graph=True)
    assert value.item() == pytest.approx(wanted["loss"], rel=TOLERANCE, abs=TOLERANCE)
    assert gradient.tolist() == pytest.approx(wanted["gradient"], rel=TOLERANCE, abs=TOLERANCE)
    found = {name: float(metrics[name]) for name in wanted["metrics"]}
    assert found == pytest.approx(wanted["metrics"], rel=TOLERANCE, abs=TOLERANCE)
