"""Linear layers by oneDNN: what torch's own give, forward and back, and weights laid out for few tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rlhf_lightning.engines import host_linear
from rlhf_lightning.engines.host_linear import HostLinear, packed, use_host_linears

pytestmark = pytest.mark.skipif(not host_linear._exact(), reason="oneDNN is absent, or rounds on this CPU")


def pair(*, bias: bool) -> tuple[nn.Linear, HostLinear]:
    """A layer of torch's and a copy of it that is changed."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(48, 80, bias=bias))
    changed = copy.deepcopy(plain)
    use_host_linears(changed)
    assert isinstance(plain[0], nn.Linear)
    assert isinstance(changed[0], HostLinear)
    return plain[0], changed[0]


def passed(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of a sum that weighs its elements differently."""
    x = x.clone().requires_grad_()
    output = layer(x)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    (output * weights).sum().backward()
    found = [output, x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(300, 48), (2, 200, 48), (7, 48)])
def test_outputs_and_gradients_are_those_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    plain, changed = pair(bias=bias)
    x = torch.randn(shape)
    many = x.numel() // 48 >= 256
    assert (type(changed(x).grad_fn).__name__ == "_ProductBackward") == many
    for found, wanted in zip(passed(changed, x), passed(plain, x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


def test_frozen_parts_are_given_no_gradient() -> None:
    _, changed = pair(bias=True)
    changed.weight.requires_grad = False
    x = torch.randn(300, 48)
    changed(x).sum().backward()
    assert changed.weight.grad is None
    assert changed.bias is not None
    torch.testing.assert_close(changed.bias.grad, torch.full((80,), 300.0))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 32, 200, 300])
def test_packed_weights_give_the_same_and_are_let_go(tokens: int, bias: bool) -> None:
    plain, changed = pair(bias=bias)
    x = torch.randn(tokens, 48)
    with torch.no_grad(), packed(changed):
        assert changed.packed is not None
        torch.testing.assert_close(changed(x), plain(x), rtol=1e-5, atol=1e-5)
    assert changed.packed is None


def test_a_packed_layer_computes_with_what_was_packed() -> None:
    plain, changed = pair(bias=False)
    x = torch.randn(4, 48)
    with torch.no_grad(), packed(changed):
        changed.weight.zero_()
        torch.testing.assert_close(changed(x), plain(x), rtol=1e-5, atol=1e-5)
    assert not changed(x).any()


def test_other_types_and_settings_are_left_alone() -> None:
    plain, changed = pair(bias=True)
    x = torch.randn(300, 48, dtype=torch.bfloat16)
    assert torch.equal(changed.to(torch.bfloat16)(x), plain.to(torch.bfloat16)(x))
    with packed(changed):
        assert changed.packed is None
    before = host_linear._matmul().fp32_precision
    with pytest.raises(RuntimeError, match="shapes"):
        changed.float()(torch.randn(300, 47))
    assert host_linear._matmul().fp32_precision == before
    assert list(changed.state_dict()) == list(plain.state_dict())
