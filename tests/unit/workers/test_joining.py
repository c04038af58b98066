"""Rows of several batches in one, whatever the widths of their prompts and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from rlhf_lightning.controller import Batch
from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.transport import Future
from rlhf_lightning.workers import beside, joined, rows_together
from tests.unit.controller.devices import Devices


def rows(prompt: int, answer: int, *, first: int) -> Batch:
    """Two rows, whose numbers count from `first` and are nowhere 0."""
    prompts = torch.arange(first, first + 2 * prompt).view(2, prompt)
    answers = prompts.new_full((2, answer), first)
    return Batch.of(
        {
            "prompt_ids": prompts,
            "prompt_mask": prompts > 0,
            "response_ids": answers,
            "response_mask": answers > 0,
            "advantages": answers.float(),
            "row_truncated": torch.ones(2, dtype=torch.bool),
            "rows": [{"row": first}, {"row": first + 1}],
        }
    )


def test_prompts_are_padded_on_the_left_and_answers_on_the_right() -> None:
    both = joined([rows(3, 2, first=1), rows(2, 4, first=100)])
    assert both["prompt_ids"].tolist() == [[1, 2, 3], [4, 5, 6], [0, 100, 101], [0, 102, 103]]
    assert both["response_ids"].tolist() == [[1, 1, 0, 0]] * 2 + [[100] * 4] * 2
    assert torch.equal(both["response_mask"], both["response_ids"] > 0)
    assert torch.equal(both["prompt_mask"], both["prompt_ids"] > 0)
    assert both["advantages"].tolist() == both["response_ids"].tolist()
    assert both["row_truncated"].tolist() == [True] * 4
    assert both.objects("rows") == [{"row": number} for number in (1, 2, 100, 101)]


def test_prompts_alone_are_joined_too() -> None:
    both = joined([rows(1, 1, first=1).select(["prompt_ids", "prompt_mask"]), rows(2, 2, first=5)])
    assert list(both) == ["prompt_ids", "prompt_mask"]
    assert both["prompt_ids"].tolist() == [[0, 1], [0, 2], [5, 6], [7, 8]]


def columns_of(parts: Sequence[Batch], name: str) -> list[list[object]]:
    return cast("list[list[object]]", joined(parts)[name].tolist())


def test_columns_of_ones_own_are_padded_where_their_own_widths_differ() -> None:
    """Whatever the widths of answers: answers of one width go with given ones of several, and the reverse."""
    narrow, wide = torch.tensor([[1, 2]] * 2), torch.tensor([[3, 4, 5]] * 2)
    for answers in ((4, 4), (2, 4)):
        own = [
            rows(2, width, first=1)
            | {"given_ids": ids, "score_parts": torch.ones(2, 2), "nested": ids[..., None]}
            for width, ids in zip(answers, (narrow, wide), strict=True)
        ]
        assert columns_of(own, "given_ids") == [[1, 2, 0]] * 2 + [[3, 4, 5]] * 2
        assert columns_of(own, "nested") == [[[1], [2], [0]]] * 2 + [[[3], [4], [5]]] * 2
        assert columns_of(own, "score_parts") == [[1, 1]] * 4, "as wide as answers, by accident"


class Held(Devices):
    """Holds blocks, and counts how many are asked for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.blocks: dict[Future, Block] = {}
        self.asked = 0

    def hold(self, block: Block) -> Future:
        future = Future()
        future.transport, self.blocks[future] = self, block
        return future

    def fetch(self, futures: Sequence[Future]) -> list[object]:
        self.asked += len(futures)
        return [self.blocks[future] for future in futures]


@pytest.mark.parametrize("held", [1, 2])
def test_columns_stay_on_their_devices_where_answers_have_one_width(held: int) -> None:
    for width, asked in ((3, 0), (2, held)):
        devices, parts = Held(), [rows(2, width, first=1), rows(2, 3, first=5)]
        expected = joined(parts)["advantages"]
        for number in range(held):
            parts[number] |= parts[number].select(["advantages"]).with_sources(devices.hold)
        both = joined(parts)
        assert devices.asked == asked
        assert torch.equal(both["advantages"], expected)


def test_a_column_that_cannot_be_joined_is_named() -> None:
    whole, half = (
        rows(1, 1, first=1) | {"mine": torch.ones(2, 2, dtype=t)} for t in (torch.int64, torch.half)
    )
    with pytest.raises(ValueError, match=r"^blocks of column 'mine' differ in dtype and width: \["):
        _ = joined([whole, half])["mine"]


def test_answers_to_one_prompt_stand_side_by_side() -> None:
    ids = torch.tensor([7, 3])
    given, drawn = (rows(2, width, first=n) | {"row_ids": ids} for width, n in ((1, 1), (2, 5)))
    pairs = beside([given | {"margins": torch.ones(2)}, drawn])
    assert pairs["row_truncated"].shape == (4,)
    assert pairs["response_ids"].tolist() == [[1, 0], [5, 5]] * 2
    assert [pairs[name].tolist() for name in ("row_ids", "group_ids")] == [[7, 7, 3, 3]] * 2
    assert "margins" not in pairs, "the drawn have none"
    other = drawn | {"row_ids": ids * 4, "group_ids": ids}  # as `answers_to` makes them
    assert beside([given, other, drawn])["group_ids"].tolist() == [7] * 3 + [3] * 3


@pytest.mark.parametrize("ids", [[3, 7], [7], [7, 3, 5]])
def test_answers_to_several_prompts_are_no_pairs(ids: list[int]) -> None:
    given = rows(2, 1, first=1) | {"row_ids": torch.tensor([7, 3])}
    earlier = Batch.of({"row_ids": torch.tensor(ids), "prompt_mask": torch.ones(len(ids), 1)})
    with pytest.raises(ValueError, match=r"^beside\(2 batches\): number 2 has other prompts than the f"):
        beside([given, earlier])
    with pytest.raises(ValueError, match=r"^beside\(\[\]\): give at least one"):
        beside([])


def test_groups_that_differ_in_size_are_not_kept_together() -> None:
    def size(*groups: int) -> int:
        return rows_together(Batch.of({"group_ids": torch.tensor(groups)}))

    assert [size(7, 7, 3, 3), size(7, 3), size(7, 7)] == [2, 1, 2]
    assert size(7, 7, 3, 3, 3, 3) == 2, "a prompt comes twice, side by side"
    assert size(7, 3, 3, 5) == size(7, 3, 7, 3) == 1
    for groups in ((7, 7, 3, 3, 3), (7, 3, 3, 3)):
        with pytest.raises(ValueError, match=r"^group_ids: groups of \d and of 3 neighbours in one batch"):
            size(*groups)
