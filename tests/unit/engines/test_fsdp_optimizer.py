"""Rates by hand, clipping, and steps that are left out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlhf_lightning.engines.optimizer import ClippedAdamW, gradient_norm, learning_rate
from rlhf_lightning.spec import OptimizerSpec


@pytest.mark.parametrize(
    ("spec", "rates"),
    [
        (OptimizerSpec(lr=1.0), [1, 1, 1]),
        (OptimizerSpec(lr=1.0, warmup_steps=3), [0.25, 0.5, 0.75, 1, 1]),
        (OptimizerSpec(lr=1.0, warmup_ratio=0.3, total_steps=10), [0.25, 0.5, 0.75, 1, 1]),
        (OptimizerSpec(lr=2.0, schedule="linear", total_steps=4), [2, 1.5, 1, 0.5, 0, 0]),
        (OptimizerSpec(lr=1.0, schedule="linear", warmup_ratio=0.3, total_steps=3), [0.5, 1, 0.5, 0]),
        (OptimizerSpec(lr=1.0, schedule="linear", warmup_steps=1, total_steps=3), [0.5, 1, 0.5, 0]),
        (OptimizerSpec(lr=1.0, schedule="cosine", total_steps=2), [1, 0.5, 0, 0]),
        (OptimizerSpec(lr=2.0, schedule="linear", total_steps=2, min_lr_ratio=0.5), [2, 1.5, 1, 1]),
        (OptimizerSpec(lr=1.0, schedule="cosine", total_steps=2, min_lr_ratio=0.1), [1, 0.55, 0.1, 0.1]),
    ],
)
def test_each_schedule_gives_its_rates(spec: OptimizerSpec, rates: list[float]) -> None:
    assert [learning_rate(spec, step) for step in range(len(rates))] == pytest.approx(rates)


def _parameters() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.tensor([1.0, 2.0])), "b": nn.Parameter(torch.tensor([[3.0]]))}


def _set(parameters: dict[str, nn.Parameter], gradient: float) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, gradient)


def test_it_is_adamw_on_the_clipped_gradient() -> None:
    ours, theirs = _parameters(), _parameters()
    spec = OptimizerSpec(lr=0.3, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5, grad_clip=1.0, warmup_steps=2)
    optimizer = ClippedAdamW(ours, spec, group=None)
    expected = torch.optim.AdamW(theirs.values(), betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    for gradient, rate in ((0.2, 0.1), (4.0, 0.2), (-3.0, 0.3)):
        expected.param_groups[0]["lr"] = rate
        _set(ours, gradient)
        _set(theirs, gradient)
        report = optimizer.step()
        nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        expected.step()
        assert report["grad_norm"] == pytest.approx(abs(gradient) * math.sqrt(3))
        assert all(parameter.grad is None for parameter in ours.values())
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


def test_a_clip_of_0_is_none() -> None:
    steps = {}
    for clip in (0.0, 1e6):
        parameters = _parameters()
        optimizer = ClippedAdamW(parameters, OptimizerSpec(lr=0.1, eps=1.0, grad_clip=clip), group=None)
        _set(parameters, 100.0)
        optimizer.step()
        steps[clip] = parameters["a"].detach()
    assert torch.equal(steps[0.0], steps[1e6])


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_left_out_and_counted(gradient: float) -> None:
    parameters = _parameters()
    optimizer = ClippedAdamW(parameters, OptimizerSpec(lr=0.1, warmup_steps=9), group=None)
    _set(parameters, 1.0)
    assert optimizer.step() == {"grad_norm": pytest.approx(math.sqrt(3)), "lr": 0.01, "skipped_steps": 0.0}
    before = parameters["a"].detach().clone()
    _set(parameters, gradient)
    report = optimizer.step()
    assert report["skipped_steps"] == 1
    assert not math.isfinite(report["grad_norm"])
    assert torch.equal(parameters["a"], before)
    assert parameters["a"].grad is None
    _set(parameters, 1.0)
    assert optimizer.step()["lr"] == pytest.approx(0.02)
    assert not torch.equal(parameters["a"], before)
    state = optimizer.state()
    assert state == {"steps": 2, "skipped_steps": 1, "moment_steps": {"a": 2, "b": 2}}
    later = ClippedAdamW(_parameters(), optimizer.spec, group=None)
    later.restore(state)
    assert later.state() == state


def test_the_state_of_other_parameters_is_refused() -> None:
    optimizer = ClippedAdamW(_parameters(), OptimizerSpec(), group=None)
    with pytest.raises(ValueError, match="of another model, this one has no c"):
        optimizer.restore({"steps": 1, "skipped_steps": 0, "moment_steps": {"a": 1, "c": 1}})
    for name in (state := optimizer.state()):
        with pytest.raises(ValueError, match=r"or moment_steps is missing\. Type the directory"):
            optimizer.restore({key: value for key, value in state.items() if key != name})


def test_ranks_without_gradients_meet_the_others_on_their_device() -> None:
    elsewhere = torch.device("meta")
    assert gradient_norm([], group=None, device=elsewhere).device == elsewhere
    parameters = {"a": torch.nn.Parameter(torch.zeros(2, device=elsewhere))}
    optimizer = ClippedAdamW(parameters, OptimizerSpec(), group=None)
    assert optimizer._device == elsewhere
