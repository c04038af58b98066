"""Adapters are the same in whatever order and type their layers are named."""

from __future__ import annotations

from rlhf_lightning.spec import LoRA


def test_named_layers_have_one_order() -> None:
    one, other = LoRA(target_modules=("v_proj", "q_proj")), LoRA(target_modules=["q_proj", "v_proj"])  # type: ignore[arg-type]
    assert one == other
    assert hash(one) == hash(other)
