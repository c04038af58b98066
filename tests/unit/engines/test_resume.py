"""The native generator is paused, asked how far it came, and goes on: as if it had never been paused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.engines.native.engine import NativeEngine
from rlhf_lightning.engines.native.generator import NativeGenerator
from rlhf_lightning.engines.training import TrainEngine
from rlhf_lightning.spec import Sampling
from tests.unit.engines.decoders import agree, table, token_lists
from tests.unit.engines.test_finished import generator
from tests.unit.engines.test_native import LENGTHS, PAD, STOPS
from tests.unit.engines.tiny import SEAT

SAMPLING = Sampling(max_new_tokens=13)


def after(steps: int) -> Callable[[Tensor], bool]:
    """Pause after so many steps."""
    counted = count()
    return lambda _: next(counted) == steps


def engine() -> NativeEngine:
    """The generator as roles have it, over a training engine that only lends its decoder."""
    lent = SimpleNamespace(generating=lambda: nullcontext(generator().decoder))
    ends = Ends(pad_token_id=PAD, eos_token_ids=STOPS)
    return NativeEngine(cast(TrainEngine, lent), seat=SEAT, ends=ends, config=Native())


def paused(
    native: NativeGenerator | NativeEngine,
    rows: TensorDict,
    steps: int,
    *,
    at_once: int = 0,
    sampling: Sampling = SAMPLING,
) -> TensorDict:
    """The rows with what they have said after some more steps."""
    said = native.resume(rows, sampling=sampling, seed=5, pause=after(steps), at_once=at_once)
    return TensorDict({**rows, **said}, batch_size=rows.batch_size)


def never(_: Tensor) -> bool:
    return False


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(max_new_tokens=13, temperature=0)], ids=str)
@pytest.mark.parametrize("config", [Native(), Native(slots=2, refill=1)], ids=["at once", "slots"])
def test_pauses_change_nothing(config: Native, sampling: Sampling) -> None:
    native, rows = generator(config), table(token_lists(LENGTHS))
    whole = native.generate(rows, sampling=sampling, seed=5)
    assert len(set(whole["response_mask"].sum(1).tolist())) > 2
    lengths, pauses = [torch.zeros(len(rows), dtype=torch.int64)], 0
    while not lengths[-1].equal(whole["response_mask"].sum(1)):
        rows = paused(native, rows, 3, sampling=sampling)
        length = rows["response_mask"].sum(1)
        # What is there is the beginning of the answer, and nothing stands behind it.
        assert rows["response_mask"].equal(torch.arange(13) < length[:, None])
        assert rows["response_ids"].equal(whole["response_ids"].where(rows["response_mask"], PAD))
        assert rows["ended"].equal(length == whole["response_mask"].sum(1))
        assert (length >= lengths[-1]).all()
        lengths.append(length)
        pauses += 1
    assert pauses > 3
    agree(rows, whole)


def test_a_pause_after_each_number_of_steps_counts_tokens() -> None:
    native, rows = generator(), table(token_lists(LENGTHS))
    lengths = native.generate(rows, sampling=SAMPLING, seed=5)["response_mask"].sum(1)
    for steps in (0, 1, 2, 7):
        said = paused(native, rows, steps)
        assert said["response_mask"].sum(1).equal(lengths.clamp(max=steps))
        assert said["log_probs"].ne(0).equal(said["response_mask"])


def test_a_pause_may_wait_for_a_number_of_finished_rows() -> None:
    native, rows = generator(), table(token_lists([5] * 12))
    whole = native.generate(rows, sampling=SAMPLING, seed=5)
    said = native.resume(rows, sampling=SAMPLING, seed=5, pause=lambda ended: int(ended.sum()) >= 5)
    ended, lengths = said["ended"], whole["response_mask"].sum(1)
    assert 5 <= int(ended.sum()) < 12
    assert lengths[ended].max() <= lengths[~ended].min()
    agree(said[ended], whole[ended])


def test_so_many_at_once_the_first_ones_first() -> None:
    native, rows = engine(), table(token_lists(LENGTHS))
    said = paused(native, rows, 1, at_once=3)
    assert said["response_mask"].sum(1).tolist() == [1, 1, 1, 0, 0, 0, 0]
    whole = native.resume(said, sampling=SAMPLING, seed=5, pause=never, at_once=3)
    assert whole["ended"].all()
    agree(whole, native.generate(rows, sampling=SAMPLING, seed=5))


def test_rows_that_have_ended_cost_nothing() -> None:
    native, rows = generator(), table(token_lists(LENGTHS))
    done = paused(native, rows, 99)
    forwards: list[int] = []
    module = native.decoder.module  # type: ignore[attr-defined]
    hook = module.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: forwards.append(ids[0].shape[1])
    )
    agree(paused(native, done, 99), done)
    assert not forwards
    hook.remove()


def test_no_rows_give_empty_columns() -> None:
    said = paused(generator(), table([]), 3)
    assert said["response_ids"].shape == (0, 13)
    assert said["ended"].shape == (0,)


def test_another_length_is_refused() -> None:
    native, rows = generator(), table(token_lists(LENGTHS))
    said = paused(native, rows, 3)
    with pytest.raises(ValueError, match=r"max_new_tokens=9: .* begun with 13. Continue with 13"):
        native.resume(said, sampling=Sampling(max_new_tokens=9), seed=5, pause=never)
