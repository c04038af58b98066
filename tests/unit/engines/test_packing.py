"""Packing by hand-written examples."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from rlhf_lightning.engines.packed.attention import Packed
from rlhf_lightning.engines.packed.packing import Place, micro_batches, pack, plan, row_lengths, select
from rlhf_lightning.functional import DPOLoss, PolicyLoss, row_ends
from tests.unit.engines import tiny


def _bits(*rows: str) -> Tensor:
    return torch.tensor([[digit == "1" for digit in row] for row in rows])


ROWS = {
    "prompt_ids": torch.tensor([[0, 11, 12], [0, 0, 21], [31, 32, 33]]),
    "prompt_mask": _bits("011", "001", "111"),
    "response_ids": torch.tensor([[13, 14, 15, 0], [22, 23, 24, 25], [0, 0, 0, 0]]),
    "response_mask": _bits("1010", "1111", "0000"),
}
"""A gap, a full row, and a row with nothing."""


def test_a_row_ends_after_its_last_valid_place() -> None:
    assert row_ends(ROWS["response_mask"]).tolist() == [3, 4, 0]
    assert row_lengths(ROWS["prompt_mask"], ROWS["response_mask"]) == [5, 5, 0]
    assert row_ends(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("place", "ids", "keep"),
    [
        ("before", [11, 12, 13, 14, 21, 22, 23, 24], [1, 3, 4, 5, 6, 7]),
        ("after", [11, 12, 13, 14, 15, 21, 22, 23, 24, 25], [2, 4, 6, 7, 8, 9]),
    ],
)
def test_tokens_and_the_places_that_speak_for_them(place: Place, ids: list[int], keep: list[int]) -> None:
    packed = pack(ROWS, place=place)
    assert packed.input_ids.tolist() == [ids]
    assert packed.keep.tolist() == keep
    assert packed.targets.tolist() == [13, 15, 22, 23, 24, 25]
    assert isinstance(packed.sequences, Packed)
    assert packed.sequences.lengths == (len(ids) // 2, len(ids) // 2)
    unpacked = packed.unpack(torch.arange(1, 7, dtype=torch.bfloat16))
    assert unpacked.dtype == torch.float32
    assert unpacked.tolist() == [[1, 0, 2, 0], [3, 4, 5, 6], [0, 0, 0, 0]]


def test_unpacking_passes_gradients_to_valid_tokens() -> None:
    values = torch.ones(6, requires_grad=True)
    (pack(ROWS, place="before").unpack(values) * torch.arange(12.0).view(3, 4)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 2, 4, 5, 6, 7]


def test_rows_without_a_valid_token_become_one_filler_token_of_no_effect() -> None:
    packed = pack({name: column[2:] for name, column in ROWS.items()}, place="before")
    assert packed.input_ids.shape == (1, 1)
    values = torch.ones(1, requires_grad=True)
    unpacked = packed.unpack(values)
    assert unpacked.tolist() == [[0, 0, 0, 0]]
    unpacked.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0]


@pytest.mark.parametrize(
    ("lengths", "budget", "parts"),
    [
        ([3, 9, 0, 4], 1, [[1], [3], [0]]),
        ([3, 9, 0, 4], 9, [[1], [3, 0]]),
        ([3, 9, 0, 4], 13, [[1, 3], [0]]),
        ([3, 9, 0, 4], 16, [[1, 3, 0]]),
        ([0, 0], 16, []),
        ([], 16, []),
    ],
)
def test_micro_batches_keep_to_the_budget(lengths: list[int], budget: int, parts: list[list[int]]) -> None:
    assert micro_batches(lengths, budget) == parts


def test_a_column_of_texts_is_none_for_a_loss() -> None:
    rows = TensorDict({**ROWS, "rows": NonTensorStack({"a": 1}, {"a": 2}, {"a": 3})}, batch_size=3)
    with pytest.raises(ValueError, match=r"'rows' is a list .*, and a loss reads tensors.*{'rows': torch"):
        select(rows, [0, 1], tiny.Fit(columns=("rows",)), device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["prompt_mask", "response_mask"])
def test_a_mask_of_numbers_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} holds torch\.int64\. Make it one of bool: {name}\.bool"):
        pack(ROWS | {name: ROWS[name].long()}, place="before")


@pytest.mark.parametrize("what", ["prompt", "response"])
def test_the_mask_of_other_ids_is_refused(what: str) -> None:
    wider = torch.ones(3, 9, dtype=torch.int64)
    told = rf"^{what}_ids are \[3, 9\] and {what}_mask \[3, [34]\]: they belong together\. Take both from "
    for place in ("before", "after"):
        with pytest.raises(ValueError, match=told):
            pack(ROWS | {f"{what}_ids": wider}, place=place)


def test_a_response_without_a_prompt_has_a_place_after_its_tokens_only() -> None:
    rows = ROWS | {"prompt_mask": _bits("011", "000", "000")}
    assert pack(rows, place="after").input_ids.tolist() == [[11, 12, 13, 14, 15, 22, 23, 24, 25]]
    with pytest.raises(ValueError, match=r"^prompt_mask: row 1 has a response but no prompt"):
        pack(rows, place="before")


def test_no_rows_are_filled_up_with_as_many_as_a_loss_compares() -> None:
    rows = TensorDict({**ROWS, "ref_log_probs": torch.ones(3, 4)}, batch_size=3)
    filled = select(rows, [], DPOLoss(), device=torch.device("cpu"))
    assert {len(column) for column in filled.values()} == {2}
    assert not any(column.any() for column in filled.values())


def test_rows_that_a_loss_compares_are_computed_together() -> None:
    rows = TensorDict({"prompt_mask": _bits("11", "11"), "response_mask": _bits("11", "11")}, batch_size=2)
    assert plan(rows, 4, None) == plan(rows, 4, PolicyLoss()) == [[0], [1]]
    assert plan(rows, 4, DPOLoss()) == [[0, 1]]  # more than the budget
    assert (plan(rows[:0], 4, None), plan(rows[:0], 4, PolicyLoss())) == ([], [[]])
