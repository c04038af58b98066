"""Scores that depend on all rows of a batch: the same under every placement, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch
from tensordict import TensorDict

from rlhf_lightning.controller import BROADCAST, DP, RANK_ZERO, Batch, Parts, WorkerError, register
from rlhf_lightning.parallel import need_all_ranks
from rlhf_lightning.workers import Reward
from tests.unit.workers.test_judge import on_devices

NUMBERS = [1.0, 2.0, 6.0, 3.0, 8.0]
ORDER = [[4, 1, 0], [3, 2]]
"""Rows in the order in which their answers end, in two parts."""


@dataclass(frozen=True, kw_only=True)
class Centred(Reward):
    """Numbers less their mean over the batch."""

    @register(transfer=DP, reads=("number",), returns=("scores",))
    def compute_reward(self, rows: TensorDict) -> TensorDict:  # type: ignore[override]
        """By sums over the ranks."""
        number = rows["number"]
        total, count = self.add_over_ranks(torch.tensor([float(number.sum()), len(number)]))
        return TensorDict({"scores": number - total / count}, batch_size=rows.batch_size)

    @register(transfer=BROADCAST, reads=("number",), returns=("scores",))
    def whole(self, rows: TensorDict) -> TensorDict:
        """By all rows."""
        return TensorDict({"scores": rows["number"] - rows["number"].mean()}, batch_size=rows.batch_size)

    @register(transfer=RANK_ZERO)
    def alone(self) -> int:
        """Where all ranks are needed."""
        need_all_ranks("mine")
        return self.worker.rank


def in_parts() -> Batch:
    """The numbers as a generator hands them over."""
    parts = [Batch.of({"at": torch.tensor(rows), "number": torch.tensor(NUMBERS)[rows]}) for rows in ORDER]
    numbers = Parts(tuple(part.column("at") for part in parts))
    return Batch.in_parts(numbers, [part.select(["number"]) for part in parts])


def test_a_sum_over_all_rows_is_refused_in_a_call_of_a_part() -> None:
    role = on_devices(Centred(), 1)
    whole = Batch.of({"number": torch.tensor(NUMBERS)})
    assert role.compute_reward(whole)["scores"].tolist() == [-3.0, -2.0, 2.0, -1.0, 4.0]
    with pytest.raises(
        WorkerError,
        match=(
            r"^judge\[rank 0, node .*\]\.compute_reward: Centred\.add_over_ranks: the answers come in parts "
            r"here, and this call has one of them\. Register .* transfer=BROADCAST, .* or do it in `step`\.\n"
        ),
    ):
        role.compute_reward(in_parts())
    assert role.compute_reward(whole)["scores"].tolist() == [-3.0, -2.0, 2.0, -1.0, 4.0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_method_that_is_given_all_rows_has_them_in_order(ranks: int) -> None:
    role = cast(Centred, on_devices(Centred(), ranks))
    found = role.whole(in_parts())
    assert found["scores"].tolist() == [-3.0, -2.0, 2.0, -1.0, 4.0]


def test_a_call_of_some_ranks_is_known_as_one() -> None:
    alone, several = (cast(Centred, on_devices(Centred(), ranks)) for ranks in (1, 2))
    assert alone.alone().fetch() == 0
    with pytest.raises(WorkerError, match=r"\.alone: mine: the ranks .* this call is not of all of them\."):
        several.alone()
