"""Batches: views are the rows that the same operations on tensors give, and what is read is one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from rlhf_lightning.controller import Batch
from rlhf_lightning.controller.block import Block, decode, encode


def numbers(rows: int, first: int = 0) -> Batch:
    return Batch.of({"x": torch.arange(first, first + 2 * rows).view(rows, 2)})


def test_a_row_of_views_equals_the_same_on_tensors() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        batch = Batch.joined([numbers(5), numbers(3, first=100), numbers(1, first=200)])
        plain = torch.cat([numbers(5)["x"], numbers(3, first=100)["x"], numbers(1, first=200)["x"]])
        for _ in range(4):
            rows = rng.integers(0, len(batch), size=int(rng.integers(1, 9)))
            batch, plain = batch.take(rows), plain[torch.from_numpy(rows)]
            batch, plain = batch.repeat(2), plain.repeat_interleave(2, dim=0)
            batch = Batch.joined(list(reversed(batch.split(3))))
            plain = torch.cat(list(reversed([plain[a:b] for a, b in _edges(len(plain), 3)])))
        assert torch.equal(batch["x"], plain)


def _edges(rows: int, parts: int) -> list[tuple[int, int]]:
    return [(rows * i // parts, rows * (i + 1) // parts) for i in range(parts)]


@pytest.mark.parametrize(("rows", "sizes"), [(7, [2, 2, 3]), (2, [0, 1, 1]), (0, [0, 0, 0]), (6, [2, 2, 2])])
def test_parts_differ_by_one_row_at_most(rows: int, sizes: list[int]) -> None:
    parts = numbers(rows).split(3)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(Batch.joined(parts)["x"], numbers(rows)["x"])


def test_what_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="give at least one batch"):
        Batch.joined([])
    assert len(Batch.joined([Batch({}, num_rows=2), numbers(3)])) == 5  # nobody reads a column of them
    with pytest.raises(ValueError, match=r"Batch\(2 rows: x\), Batch\(1 rows: y\) have no column in common"):
        Batch.joined([numbers(2), Batch.of({"y": torch.zeros(1)})])


def test_a_batch_is_split_again_as_it_is_asked() -> None:
    values = torch.arange(12)
    joined = Batch.joined([Batch.of({"x": part}) for part in values.split(4)])
    for parts in (3, 2, 3, 5, 1, 3):
        found = [part["x"].tolist() for part in joined.split(parts)]
        assert found == [values[start:stop].tolist() for start, stop in _edges(12, parts)]
    column = joined.column("x")
    assert column.split([0, 5, 12]) is column.split([0, 5, 12])


def test_a_part_without_rows_keeps_width_and_type() -> None:
    assert numbers(2).split(3)[0]["x"].shape == (0, 2)
    assert numbers(2).take([])["x"].dtype == torch.int64


def test_of_joined_columns_without_rows_the_first_stays() -> None:
    """Their widths differ where each device pads to its own longest row."""
    joined = Batch.joined([numbers(0), Batch.of({"x": torch.zeros(0, 3)})])
    assert joined["x"].shape == (0, 2)


def test_rows_of_a_part_are_taken_by_their_numbers_in_it() -> None:
    part = numbers(7).split(2)[1]
    assert part.take([2, 0])["x"].tolist() == [[10, 11], [6, 7]]


def test_of_a_block_of_this_process_only_the_rows_are_sent() -> None:
    (piece,) = numbers(6).take([4, 1]).column("x").pieces
    block, pick = piece.shipped()
    assert isinstance(block, Block)
    assert torch.equal(torch.as_tensor(decode([block])), torch.tensor([[8, 9], [2, 3]]))
    assert pick == slice(0, 2)


@pytest.mark.parametrize(("rows", "pick"), [([2, 3, 4], slice(2, 5)), ([5], slice(5, 6))])
def test_neighbours_are_picked_as_a_slice(rows: list[int], pick: slice) -> None:
    (piece,) = numbers(6).take(rows).column("x").pieces
    assert piece.pick() == pick


def test_what_is_read_may_be_written_to() -> None:
    batch = numbers(3)
    for view in (batch, batch.take([0, 1]), batch.take([2, 0]), Batch.joined([batch, batch])):
        view["x"].zero_()
    assert batch["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_joining_columns_prefers_the_right() -> None:
    left = Batch.of({"x": torch.zeros(2), "y": torch.zeros(2)})
    both = left | {"y": torch.ones(2), "z": torch.ones(2)}
    assert list(both) == ["x", "y", "z"]
    assert both["y"].tolist() == [1, 1]
    assert list(both.select(["z", "x"])) == ["z", "x"]


def test_arrays_are_numbers() -> None:
    batch = numbers(2) | {"y": np.array([True, False]), "z": np.array([1.5, 2.5], dtype=np.float32)}
    assert batch["y"].dtype == torch.bool
    assert torch.equal(batch["z"], torch.tensor([1.5, 2.5]))
    assert Batch.of({"days": np.array(["a", "b"])}).objects("days") == ["a", "b"]


def test_a_batch_is_not_written_to() -> None:
    with pytest.raises(
        TypeError, match=r"never changed\. Make one with the column: batch \|= \{'y': values\}"
    ):
        numbers(1)["y"] = torch.zeros(1)


def test_joining_rows_keeps_the_common_columns() -> None:
    other = numbers(1) | {"y": torch.zeros(1)}
    assert list(Batch.joined([other, numbers(2)])) == ["x"]


def test_python_objects_are_read_as_such() -> None:
    batch = Batch.of({"texts": ["a", "b", "c"], "x": torch.zeros(3), "numbers": [1.0, 2.0, 3.0]})
    assert batch.take([2, 0]).objects("texts") == ["c", "a"]
    with pytest.raises(TypeError, match=r"'texts' is a list of Python objects.*batch\.objects\('texts'\)"):
        batch["texts"]
    with pytest.raises(TypeError, match=r"are added as a tensor: batch \| {'numbers': torch\.tensor"):
        batch["numbers"]


def test_what_is_fetched_is_kept_and_makes_a_batch_again() -> None:
    batch = Batch.of({"texts": ["a", "b", "c"], "x": torch.arange(3), "y": torch.zeros(3)})
    found = batch.select(["texts", "x"]).take([2, 0]).fetch()
    assert found["texts"] == ["c", "a"]
    assert torch.equal(torch.as_tensor(found["x"]), torch.tensor([2, 0]))
    again = Batch.of(found)
    assert (list(again), again.objects("texts"), again["x"].tolist()) == (["texts", "x"], ["c", "a"], [2, 0])


def test_columns_of_other_lengths_and_batches_without_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a batch of 2 rows cannot hold .* \{'y': 3\}"):
        Batch.of({"x": torch.zeros(2), "y": torch.zeros(3)})
    with pytest.raises(ValueError, match="a batch of 2 rows cannot hold"):
        _ = numbers(2) | numbers(3)
    with pytest.raises(ValueError, match="at least one column"):
        Batch.of({})


@pytest.mark.parametrize("rows", [[-1], [0, 3]])
def test_rows_that_are_not_there_are_refused(rows: list[int]) -> None:
    with pytest.raises(IndexError, match="of a batch of 3"):
        numbers(3).take(rows)


def test_an_unknown_column_lists_the_known() -> None:
    with pytest.raises(KeyError, match=r"no column 'z' in this batch; it has \['x'\]"):
        numbers(1)["z"]
    with pytest.raises(KeyError, match=r"no column 'score' .*\. Did you mean scores\?"):
        numbers(1).renamed({"x": "scores"}).column("score")


@pytest.mark.parametrize("width", [1, 100_000])
def test_what_is_written_later_into_a_tensor_is_not_in_the_batch(width: int) -> None:
    """A small column would travel with each call as it is then, a large one as it was at the first call."""
    x, y = torch.zeros(2, width), np.zeros((2, width))
    batch = Batch.of({"x": x}) | {"y": y}
    x.add_(1)
    y += 1
    assert batch["x"].eq(0).all()
    assert batch["y"].eq(0).all()


def test_a_mask_is_no_row_numbers() -> None:
    batch = Batch.of({"x": torch.arange(4)})
    mask = batch["x"].numpy() > 1
    for given in (mask, torch.from_numpy(mask), mask.tolist()):
        with pytest.raises(TypeError, match=r"Of a mask type np\.flatnonzero\(mask\)\.$"):
            batch.take(given)  # type: ignore[arg-type]
        assert batch.take(np.flatnonzero(given))["x"].tolist() == [2, 3]
    found = torch.from_numpy(mask).nonzero()
    for rows in (found[:, 0] > 1, np.arange(2), [0], slice(1), 0):
        with pytest.raises(TypeError, match=r"^batch\[\w+\]: columns are read by name\. .* of a mask by"):
            batch[rows]  # type: ignore[index]
    for wrong in (found, found[:0], found[0, 0]):
        with pytest.raises(
            TypeError, match=r"^take\(int64 \[.*\]\): wants row numbers \[n\]\. Of a mask type"
        ):
            batch.take(wrong)  # type: ignore[arg-type]
    assert batch.take(found[:, 0].tolist())["x"].tolist() == [2, 3]
    assert len(batch.take([])) == 0


@pytest.mark.parametrize("number", [1.0, np.float32(1), np.array(1.0), torch.tensor(1.0)])
def test_one_number_is_no_column(number: Any) -> None:  # noqa: ANN401
    batch = Batch.of({"x": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"^column 'bonus' is one number: .* torch\.full\("):
        batch |= {"bonus": number}


def test_what_a_plain_loader_makes_of_dicts_is_no_column() -> None:
    rows = default_collate([{"row_ids": n, "rows": {"prompt": "a", "answer": "b"}} for n in range(4)])
    with pytest.raises(ValueError, match=r"^column 'rows' is a dict and no list of rows, .* collate_fn that"):
        Batch.of(rows)


def test_a_column_that_is_placed_alike_stays_the_same_one() -> None:
    column, other = Batch.of({"x": torch.arange(6)}).column("x"), encode(torch.arange(6))
    assert column.placed(lambda block: block) is column
    placed = column.placed(lambda _: other)
    assert placed is not column
    assert [piece.source for piece in placed.pieces] == [other]
    assert column.placed(lambda _: other) is placed
    assert column.placed(Block.copied) is not placed
    assert placed.placed(lambda block: block) is placed
