"""Turns whose log-probabilities the training engine computes again, where a copy of the actor has no row."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from rlhf_lightning.controller import Worker
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import EMBEDDED, Sampling
from rlhf_lightning.workers import Actor, Settings
from tests.unit import spmd
from tests.unit.engines import three_d


def once(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str | None]:
    """Replies to the first turn of each row."""
    del prompts
    return [
        None if str(row["says"]) in said else str(row["says"])
        for said, row in zip(responses, rows, strict=True)
    ]


def answered(group: dist.ProcessGroup, layout: ParallelLayout, first: int = 5) -> dict[str, Tensor]:
    """The answers of a rank; the first copy of each replica has the only row, of a prompt of its own."""
    seat = three_d.seat(group, layout)
    actor = Actor(
        path=EMBEDDED,
        sampling=Sampling(max_new_tokens=20, stop_token_ids=tuple(range(60))),
        recompute_log_probs=True,
    )
    actor.build(Worker(**vars(seat), settings=Settings(engine="megatron")))
    replica, copy = divmod(layout.generating.replica(seat.rank), layout.generating.num_micro)
    count = 1 if copy == 0 else 0
    rows = TensorDict(
        {
            "prompt_ids": torch.tensor([[first + replica, 6, 7]])[:count],
            "prompt_mask": torch.ones(count, 3, dtype=torch.bool),
            "row_ids": torch.arange(count),
            "rows": NonTensorStack(
                *[{"prompt": "go", "says": f"<user>{first + replica}<assistant>"}][:count]
            ),
        },
        batch_size=[count],
    )
    answers = actor.answer(rows, greedy=False, environment=Environment(function=once))
    return {name: column for name, column in answers.items() if isinstance(column, Tensor)}


@pytest.mark.parametrize("p", [1, 2])
def test_copies_without_rows_recompute_with_the_others(p: int) -> None:
    (alone,) = spmd.run(1, answered, ParallelLayout())
    first, *others = spmd.run(2 * p, answered, ParallelLayout(p, 2, generation=Generation(1, 1)))
    assert alone["row_turns"].tolist() == [2]
    assert torch.equal(first["response_ids"], alone["response_ids"])
    torch.testing.assert_close(first["log_probs"], alone["log_probs"], atol=1e-4, rtol=0)
    assert not torch.equal(first["log_probs"], first["rollout_log_probs"])
    assert {len(column) for other in others for column in other.values()} == {0}


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(t=2, d=2, generation=Generation(1, 1)),
        ParallelLayout(t=2, d=2, generation=Generation(1, 2)),
        ParallelLayout(p=2, d=2, generation=Generation(1, 1)),
    ],
    ids=["whole", "divided", "stages"],
)
def test_replicas_talk_and_recompute_apart(layout: ParallelLayout) -> None:
    """Each has what is said to its own rows, and their log-probabilities, not those of the first."""
    found = spmd.run(4, answered, layout)
    for first, rank in ((5, 0), (6, 2)):
        (alone,) = spmd.run(1, answered, ParallelLayout(), first=first)
        assert torch.equal(found[rank]["response_ids"], alone["response_ids"])
        torch.testing.assert_close(found[rank]["log_probs"], alone["log_probs"], atol=1e-4, rtol=0)
