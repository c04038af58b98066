"""Weights laid out for few tokens give what torch's own layers give, and are let go."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rlhf_lightning.engines.host_linear import HostLinear, can_reorder, reordered_weights, use_host_linears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without it")


def pair(*, bias: bool) -> tuple[nn.Linear, HostLinear]:
    """A layer of torch's and a copy of it that is changed."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(48, 80, bias=bias))
    changed = copy.deepcopy(plain)
    use_host_linears(changed)
    assert isinstance(plain[0], nn.Linear)
    assert isinstance(changed[0], HostLinear)
    assert list(changed.state_dict()) == list(plain.state_dict())
    return plain[0], changed[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 48), (5, 48), (1, 32, 48), (3, 7, 48), (200, 48), (300, 48), (5000, 48)]
)
def test_reordered_weights_give_the_same_and_are_freed(shape: tuple[int, ...], bias: bool) -> None:
    plain, changed = pair(bias=bias)
    x = torch.randn(shape)
    with torch.no_grad(), reordered_weights(changed):
        assert changed.reordered is not None
        torch.testing.assert_close(changed(x), plain(x), rtol=1e-5, atol=1e-5)
    assert changed.reordered is None


@pytest.mark.parametrize(("tokens", "takes"), [(4, True), (300, True), (4096, False)])
def test_few_tokens_take_the_reordered_weights(tokens: int, takes: bool) -> None:
    _, changed = pair(bias=False)
    x = torch.randn(tokens, 48)
    with torch.no_grad(), reordered_weights(changed):
        changed.weight.zero_()
        assert bool(changed(x).any()) == takes


needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="these cores lack AVX-512"
)


@needs_bfloat16
@pytest.mark.parametrize("shape", [(1, 48), (3, 7, 48), (200, 48), (300, 48)])
def test_bfloat16_is_rounded_once(shape: tuple[int, ...]) -> None:
    plain, changed = pair(bias=False)
    x = torch.randn(shape).bfloat16()
    changed.to(torch.bfloat16)
    with torch.no_grad(), reordered_weights(changed):
        assert changed.reordered is not None
        found = changed(x)
        assert found.dtype == torch.bfloat16
        expected = plain.bfloat16().float()(x.float())
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-5)


def test_gradients_and_other_types_are_left_alone() -> None:
    plain, changed = pair(bias=True)
    x = torch.randn(4, 48)
    changed(x).sum().backward()
    plain(x).sum().backward()
    assert changed.weight.grad is not None
    assert plain.weight.grad is not None
    assert torch.equal(changed.weight.grad, plain.weight.grad)
    changed.to(torch.float16)
    with reordered_weights(changed):
        assert changed.reordered is None


def test_cores_without_bfloat16_keep_the_plain_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(4, 4)
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)
    assert can_reorder(weight)
    assert not can_reorder(weight.bfloat16())
    assert not can_reorder(weight.to("meta"))
