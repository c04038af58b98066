"""Which rows a mini-batch has, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import lightning.pytorch as pl
import pytest
import torch

from rlhf_lightning.algos import DPO, GRPO, KTO, PPO, SFT, ProcessRewardModel, RewardModel, SimPO
from rlhf_lightning.controller import Batch
from rlhf_lightning.controller.transport import Future
from rlhf_lightning.functional import SFTLoss
from tests.unit.controller.devices import Devices


def rows(tokens: list[int], **more: list[int]) -> Batch:
    columns = {"row_ends": tokens, "row_ids": list(range(len(tokens))), **more}
    prompts = torch.ones(len(tokens), 3, dtype=torch.bool)
    return Batch.of(
        {name: torch.tensor(values) for name, values in columns.items()} | {"prompt_mask": prompts}
    )


def given(tokens: list[int]) -> Batch:
    """Answers as a data module gives them."""
    mask = torch.arange(max(tokens)) < torch.tensor(tokens)[:, None]
    return rows(tokens).select(["row_ids", "prompt_mask"]) | {"response_mask": mask}


def halves(batch: Batch) -> list[int]:
    return [int(part["row_ends"].sum()) for part in batch.split(2)]


def test_devices_that_take_equal_numbers_of_rows_take_as_many_tokens() -> None:
    batch = rows([100, 90, 80, 70, 10, 20, 30, 40])
    (mini,) = PPO().mini_batches(batch, size=0)
    assert halves(batch) == [340, 100]
    assert halves(mini) == [220, 220]
    assert sorted(mini["row_ids"].tolist()) == list(range(8))
    for mini in PPO().mini_batches(batch, size=4):
        assert abs(halves(mini)[0] - halves(mini)[1]) <= 40


def test_rows_stay_where_passes_over_them_are_kept() -> None:
    batch, algorithm = rows([100, 90, 80, 70, 10, 20, 30, 40]), PPO()
    algorithm.rows_stay = True
    assert [mini is batch for mini in algorithm.mini_batches(batch, size=0, epochs=2)] == [True, True]
    assert all(halves(mini) != [170, 10] for mini in algorithm.mini_batches(batch, size=4))


def test_another_seed_of_the_run_has_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(seed: int) -> list[list[int]]:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))  # as lightning.seed_everything does
        return [mini["row_ids"].tolist() for mini in PPO().mini_batches(rows([1] * 16), size=4, epochs=2)]

    assert order(0) == order(0) != order(1)
    first, second = order(0)[:4], order(0)[4:]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(16))
    assert first != second, "each epoch has its own"


def test_the_longer_prompt_counts_too() -> None:
    batch = rows([10, 10, 10, 10])
    batch |= {"prompt_mask": torch.arange(60) < torch.tensor([60, 60, 0, 0])[:, None]}
    (mini,) = PPO().mini_batches(batch, size=0)
    assert mini["row_ids"].tolist() in ([0, 2, 1, 3], [0, 3, 1, 2])


def test_a_response_without_a_token_to_learn_from_costs_nothing() -> None:
    batch = rows([30, 0, 10, 10])
    batch |= {"prompt_mask": torch.arange(60) < torch.tensor([10, 60, 10, 10])[:, None]}
    (mini,) = PPO().mini_batches(batch, size=0)
    computed = torch.tensor([40, 0, 20, 20])[mini["row_ids"]]
    assert computed.view(2, 2).sum(dim=1).tolist() == [40, 40]


def test_answers_to_one_prompt_stay_side_by_side() -> None:
    batch = rows([9, 9, 9, 8, 1, 2, 1, 1], group_ids=[4, 4, 5, 5, 6, 6, 7, 7])
    (mini,) = GRPO().mini_batches(batch, size=0)
    assert mini["group_ids"].view(-1, 2).unique(dim=1).shape[1] == 1
    assert abs(halves(mini)[0] - halves(mini)[1]) <= 2


def test_groups_of_several_sizes_are_balanced_as_if_there_were_none() -> None:
    tokens = [9, 8, 7, 6, 4, 3, 2, 1]
    (mini,) = PPO().mini_batches(rows(tokens, group_ids=[0, 0, 1, 1, 1, 1, 2, 2]), size=0)
    (other,) = PPO().mini_batches(rows(tokens), size=0)
    assert mini["row_ids"].tolist() == other["row_ids"].tolist()


def test_pairs_are_not_torn_by_groups_of_another_size() -> None:
    batch = rows([9, 9, 9, 9, 1, 1, 1, 1], group_ids=[0, 1, 2, 3, 4, 5, 6, 7])
    (mini,) = PPO().mini_batches(batch, size=0, together=2)
    assert mini["row_ids"].view(-1, 2).tolist() in (
        [[0, 1], [4, 5], [2, 3], [6, 7]],
        [[0, 1], [6, 7], [2, 3], [4, 5]],
    )
    for mini in PPO().mini_batches(rows([9, 8, 7, 6, 4, 3, 2, 1]), size=2, together=2):
        first, second = mini["row_ids"].view(-1, 2).unbind(dim=1)
        assert torch.equal(first + 1, second)


@pytest.mark.parametrize("kind", [SFT, KTO, ProcessRewardModel])
def test_given_answers_are_balanced_by_their_masks(kind: type[SFT | KTO | ProcessRewardModel]) -> None:
    batch = given([100, 90, 80, 70, 10, 20, 30, 40])
    (mini,) = kind().mini_batches(batch, size=0)
    assert [int(part["response_mask"].sum()) for part in batch.split(2)] == [340, 100]
    assert [int(part["response_mask"].sum()) for part in mini.split(2)] == [220, 220]


@pytest.mark.parametrize("kind", [DPO, SimPO, RewardModel])
def test_given_pairs_are_balanced_and_stay_whole(kind: type[DPO | SimPO | RewardModel]) -> None:
    batch = given([50, 50, 40, 40, 10, 20, 10, 20]) | {"group_ids": torch.arange(4).repeat_interleave(2)}
    (mini,) = kind().mini_batches(batch, size=0, together=2)
    assert [int(part["response_mask"].sum()) for part in mini.split(2)] == [130, 110]
    assert (mini["row_ids"].view(-1, 2) % 2).tolist() == [[0, 1]] * 4, "chosen before rejected"


class Reads:
    """Stands for an actor or a reference: notes the tokens in each half of the rows of its calls."""

    def __init__(self, name: str) -> None:
        self.name, self.halves = name, list[list[int]]()

    def read(self, batch: Batch, **_: object) -> Batch:
        """As for a pass over these rows."""
        masks = [(part["prompt_mask"], part["response_mask"]) for part in batch.split(2)]
        self.halves.append([int(prompts.sum() + answers.sum()) for prompts, answers in masks])
        return Batch.of({self.name: torch.zeros(batch["response_mask"].shape)})

    compute_ref_log_prob = read_log_prob = read

    def update_actor(self, batch: Batch, **_: object) -> dict[str, float]:
        """As for an update with these rows."""
        self.read(batch)
        return {}


UNEVEN = [50, 50, 40, 40, 10, 20, 10, 20]


@pytest.mark.parametrize(
    ("kind", "calls", "prompts", "answers"),
    [
        (DPO, 1, [3] * 8, UNEVEN),
        (KTO, 2, [3] * 8, UNEVEN),
        (KTO, 2, [90] * 4 + [10] * 4, [10] * 4 + [90] * 4),  # even, until answers change places
    ],
)
def test_passes_over_given_answers_are_balanced_too(
    kind: type[DPO | KTO], calls: int, prompts: list[int], answers: list[int]
) -> None:
    batch = given(answers) | {"prompt_mask": torch.arange(90) < torch.tensor(prompts)[:, None]}
    batch |= {"prompt_ids": torch.arange(8)[:, None].repeat(1, 90)}
    batch |= {"response_ids": batch["response_mask"].long()}
    algorithm, actor, reference = kind(), Reads("log_probs"), Reads("ref_log_probs")
    algorithm.__dict__ |= {"actor": actor, "reference": reference}
    algorithm.step(batch)
    assert len(actor.halves) == len(reference.halves) == calls
    for first, second in actor.halves + reference.halves:
        assert abs(first - second) <= 20


def test_texts_beside_ppo_are_balanced_within_each_step() -> None:
    ppo = PPO(ptx_loss=SFTLoss(coef=1.0))
    ppo.trainer = pl.Trainer(accelerator="cpu", logger=False)
    ppo.trainer.training = True
    ppo.ptx_batch = given([100, 90, 10, 20, 70, 60, 30, 20])
    texts = list(islice(ppo.split_ptx(steps=2), 4))
    assert [sorted(part["row_ids"].tolist()) for part in texts] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    masks = [part["response_mask"] for whole in texts for part in whole.split(2)]
    assert [int(mask.sum()) for mask in masks] == [110, 110, 90, 90] * 2


class Unfetched(Devices):
    """Of columns that are still on devices."""

    def fetch(self, futures: Sequence[Future]) -> list[object]:
        """Nobody asks for one."""
        raise AssertionError("fetched")


def test_the_masks_of_drawn_answers_are_not_fetched() -> None:
    batch = given([100, 90, 80, 70, 10, 20, 30, 40])
    future = Future()
    future.transport = Unfetched(1)
    drawn = batch.select(["response_mask"]).with_sources(lambda _: future)
    (mini,) = PPO().mini_batches(mixed := batch | drawn, size=0)
    assert mini is mixed
    picked = batch.column("response_mask").picked(drawn.column("response_mask"))
    assert not picked.is_here, "the row numbers are on a device"


def test_rows_of_equal_or_unknown_length_stay_where_they_are() -> None:
    known = rows([3, 2, 1])
    of_parts = (known.select(["row_ids", name]) for name in ("row_ends", "prompt_mask"))
    for batch in (rows([7, 7, 7]), *of_parts):
        (mini,) = PPO().mini_batches(batch, size=0)
        assert mini is batch


@pytest.mark.parametrize("size", [0, 1])
def test_rows_that_are_no_whole_groups_are_refused(size: int) -> None:
    for count in (1, 5):
        said = rf"^{count} rows are no whole groups of 2 neighbours: 1 are left over\. Give a multiple of 2\."
        with pytest.raises(ValueError, match=said):
            list(GRPO().mini_batches(rows([1] * count), size=size, together=2))
