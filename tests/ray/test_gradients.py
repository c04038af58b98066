"""The gradient of every loss is the same wherever and in whatever portions it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP, FSDPEngine
from rlhf_lightning.spec import ModelSpec, Sampling
from rlhf_lightning.strategies import Colocated, Local, Standalone
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Settings
from tests.ray import losses
from tests.ray.losses import LOSSES, PROMPT, RESPONSE, Gradients, Probe
from tests.unit.algos.short import trainer

TOLERANCE = 1e-6
"""In float32 another order of addition changes the seventh digit."""


def portions(tokens: int) -> Settings:
    return Settings(train=FSDP(max_tokens_per_micro_batch=tokens))


PLACES: dict[str, Callable[[], Strategy]] = {
    "one row or pair at a time": lambda: Local(settings=portions(1)),
    "two rows at a time": lambda: Local(settings=portions(20)),
    "colocated on 2": lambda: Colocated(devices=2),
    "colocated on 2, one at a time": lambda: Colocated(devices=2, settings=portions(1)),
    "standalone": lambda: Standalone(devices=3),
}


def probe(tiny: Path, strategy: Strategy) -> Probe:
    path = str(tiny)
    actor = losses.ProbedActor(path=path, sampling=Sampling(max_new_tokens=1))
    algorithm = Probe(
        actor=actor, critic=losses.ProbedCritic(path=path), reward=losses.ProbedScorer(path=path)
    )
    trainer(strategy, tiny).fit(algorithm, datamodule=TaskData(num_rows=2, num_val_rows=0, batch_size=2))
    return algorithm


@pytest.fixture(scope="module")
def whole(tiny: Path, module_leaves_nothing: None) -> Probe:
    """All rows at once, in this process."""
    return probe(tiny, Local(settings=portions(10_000)))


def furthest(left: Gradients, right: Mapping[str, Tensor]) -> float:
    """Largest difference, in units of the largest entry where that is above 1."""
    assert left.keys() == right.keys()
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    return max(float((left[name] - right[name]).abs().max()) for name in left) / max(largest, 1)


@pytest.mark.parametrize("name", PLACES)
def test_places_and_portions_change_nothing(name: str, whole: Probe, tiny: Path) -> None:
    other = probe(tiny, PLACES[name]())
    assert set(other.gradients) == set(LOSSES)
    for loss, gradients in other.gradients.items():
        assert furthest(gradients, whole.gradients[loss]) < TOLERANCE, loss
        assert other.values[loss] == pytest.approx(whole.values[loss], abs=1e-5), loss
    check_judged(other.judged, whole)


def check_judged(judged: Mapping[str, list[Mapping[str, float]]], whole: Probe) -> None:
    """The numbers of held-out rows: of all, and of one pair, of which a second replica has no row."""
    assert set(judged) == {name for name, (owner, _) in LOSSES.items() if owner != "critic"}
    for loss, (of_all, of_a_pair) in judged.items():
        assert of_all == pytest.approx(whole.values[loss], abs=1e-5), loss
        assert of_a_pair == pytest.approx(whole.judged[loss][1], abs=1e-5), loss


def padded(model: PreTrainedModel, columns: Mapping[str, Tensor], owner: str) -> dict[str, Tensor]:
    """What plain transformers give for padded rows, differentiable."""
    mask = columns["response_mask"]
    ends = (torch.arange(1, RESPONSE + 1) * mask).amax(1)
    attention = torch.cat([columns["prompt_mask"], torch.arange(RESPONSE) < ends[:, None]], 1)
    inputs = {
        "input_ids": torch.cat([columns["prompt_ids"], columns["response_ids"]], 1),
        "attention_mask": attention.long(),
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }
    if owner == "actor":
        log_p = model(**inputs, use_cache=False).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        chosen = log_p.gather(2, columns["response_ids"][..., None])[..., 0]
        found = {"log_probs": chosen, "entropy": -(log_p.exp() * log_p).sum(-1)}
        found["candidate_log_probs"] = log_p.gather(2, columns["candidate_ids"].long())
    else:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        numbers = model.score(hidden)[..., 0]  # type: ignore[operator]
        found = {"values": numbers[:, PROMPT - 1 : -1] if owner == "critic" else numbers[:, PROMPT:]}
    return {
        name: output * mask.view(*mask.shape, *[1] * (output.dim() - 2)) for name, output in found.items()
    }


@pytest.mark.parametrize("name", LOSSES)
def test_padded_rows_give_the_same(name: str, whole: Probe, tiny: Path, tmp_path: Path) -> None:
    owner, loss = LOSSES[name]
    head = {"actor": "lm", "critic": "scalar", "reward": "reward"}[owner]
    FSDPEngine(ModelSpec(path=str(tiny)), head=head).export(tmp_path)  # type: ignore[arg-type]
    kind = AutoModelForCausalLM if owner == "actor" else AutoModelForSequenceClassification
    model = kind.from_pretrained(tmp_path, attn_implementation="sdpa", dtype=torch.float32)
    rows = losses.columns()
    value, _ = loss(padded(model, rows, owner), rows, loss.count(rows))
    torch.autograd.backward(value)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert furthest(whole.gradients[name], gradients) < TOLERANCE
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-3
