"""Prompts that several rows answer: computed once, with the numbers of rows computed one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines import FSDP, FSDPEngine, Head
from rlhf_lightning.engines.packed.packing import Place, pack
from rlhf_lightning.engines.packed.sharing import Shared
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Fit

# float32 sums of some hundred terms in another order: a few of 2^-24.
SAME = 1e-6


def bits(*rows: str) -> Tensor:
    return torch.tensor([[digit == "1" for digit in row] for row in rows])


ROWS = {
    "prompt_ids": torch.tensor([[0, 11, 12], [5, 11, 12], [11, 12, 13], [0, 11, 12], [0, 11, 12]]),
    "prompt_mask": bits("011", "011", "111", "011", "011"),
    "response_ids": torch.tensor([[13, 14], [15, 16], [17, 0], [0, 0], [18, 19]]),
    "response_mask": bits("11", "11", "10", "00", "01"),
}
"""Rows 0, 1 and 4 share a prompt, whatever stands in the padding; row 3 would, but says nothing."""


@pytest.mark.parametrize(
    ("place", "ids", "positions", "keep"),
    [
        ("before", [11, 12, 13, 15, 11, 12, 13, 18], [0, 1, 2, 2, 0, 1, 2, 2], [1, 2, 1, 3, 6, 7]),
        (
            "after",
            [11, 12, 13, 14, 15, 16, 11, 12, 13, 17, 18, 19],
            [0, 1, 2, 3, 2, 3, 0, 1, 2, 3, 2, 3],
            [2, 3, 4, 5, 9, 11],
        ),
    ],
)
def test_one_copy_is_computed_and_speaks_for_all(
    place: Place, ids: list[int], positions: list[int], keep: list[int]
) -> None:
    packed = pack(ROWS, place=place)
    assert packed.input_ids.tolist() == [ids]
    assert packed.sequences.position_ids.tolist() == [positions]
    assert packed.keep.tolist() == keep


def test_a_prompt_with_token_0_is_not_one_with_padding_there() -> None:
    rows = {
        "prompt_ids": torch.tensor([[0, 11, 12], [0, 11, 12]]),
        "prompt_mask": bits("011", "111"),
        "response_ids": torch.tensor([[13, 14], [15, 16]]),
        "response_mask": bits("11", "11"),
    }
    packed = pack(rows, place="before")
    assert packed.input_ids.tolist() == [[11, 12, 13, 0, 11, 12, 15]]
    assert packed.keep.tolist() == [1, 2, 5, 6]


def test_what_saves_little_is_not_shared() -> None:
    long = {name: column[:2] for name, column in ROWS.items()}
    long["response_ids"], long["response_mask"] = torch.zeros(2, 20).long(), torch.ones(2, 20).bool()
    assert not isinstance(pack(long, place="before").sequences, Shared)
    assert isinstance(pack(ROWS, place="before").sequences, Shared)


def group() -> TensorDict:
    """The rows of `tiny` with two prompts: rows 0, 2, 3, 5 answer one, rows 1 and 4 another."""
    rows = tiny.rows()
    which = torch.tensor([0, 1, 0, 0, 1, 0])
    for name in ("prompt_ids", "prompt_mask"):
        rows[name] = rows[name][which]
    return rows


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_losses_and_gradients_are_those_of_rows_one_by_one(tmp_path: Path, head: Head) -> None:
    path = tiny.write_causal(tmp_path) if head == "lm" else tiny.write_scalar(tmp_path)
    found = []
    for budget in (1, 1000):
        config = FSDP(max_tokens_per_micro_batch=budget)
        engine = FSDPEngine(tiny.spec(path), head=head, config=config)
        loss = engine.accumulate(group(), Fit(needs_entropy=head == "lm"), tiny.counts(), temperature=0.7)
        masters = engine._weights.masters
        found.append((loss["test/loss"], {n: p.grad for n, p in masters.items() if p.grad is not None}))
    (alone, expected), (together, gradients) = found
    assert float(together) == pytest.approx(float(alone), rel=SAME)
    assert tiny.distance(gradients, expected) < SAME
