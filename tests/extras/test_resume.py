"""Answers that are paused and gone on with: the same contract over both generation engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.spec import Sampling
from tests.extras import generating
from tests.extras.generating import EXACT, PAD, SMALL, STOPS, TOKENIZER, prompts
from tests.extras.test_vllm import BLOCK, LENGTHS, Pair
from tests.unit.engines.decoders import agree, table

DRAWN = Sampling(max_new_tokens=13, temperature=0.8, top_p=0.95, stop_token_ids=STOPS)
GREEDY = Sampling(max_new_tokens=13, temperature=0, stop_token_ids=STOPS)


@pytest.fixture(scope="module", params=["native", "vllm"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    # A generator of its own does not sleep: what vLLM has kept is still there when the weights change.
    awake = replace(SMALL, sleep=False)
    found = Pair(generating.write(tmp_path_factory.mktemp("model")), request.param, vllm=awake)
    yield found
    if request.param == "vllm":
        found.engine.close()  # type: ignore[attr-defined]


def after(steps: int) -> Callable[[Tensor], bool]:
    """Pause after so many steps."""
    counted = count()
    return lambda _: next(counted) == steps


def never(_: Tensor) -> bool:
    return False


def resumed(
    pair: Pair, rows: TensorDict, sampling: Sampling, pause: Callable[[Tensor], bool], *, at_once: int = 0
) -> TensorDict:
    """The rows with what they have said when they are paused."""
    said = pair.engine.resume(rows, sampling=sampling, seed=5, pause=pause, at_once=at_once)
    return TensorDict({**rows, **said}, batch_size=rows.batch_size)


@pytest.mark.parametrize("sampling", [DRAWN, GREEDY], ids=["drawn", "greedy"])
@pytest.mark.parametrize("at_once", [0, 3])
def test_pauses_change_nothing(pair: Pair, sampling: Sampling, at_once: int) -> None:
    rows = table(prompts(LENGTHS))
    whole = pair(rows, sampling)
    lengths = whole["response_mask"].sum(1)
    assert len(lengths.unique()) > 2
    for _ in range(30):
        rows = resumed(pair, rows, sampling, after(3), at_once=at_once)
        length = rows["response_mask"].sum(1)
        assert rows["response_mask"].equal(torch.arange(13) < length[:, None])
        assert rows["response_ids"].equal(whole["response_ids"].where(rows["response_mask"], PAD))
        assert rows["ended"].equal(length == lengths)
        if rows["ended"].all():
            break
    agree(rows, whole)


def test_a_text_that_a_pause_divides_ends_the_answer(pair: Pair) -> None:
    rows = table(prompts(LENGTHS))
    free = pair(rows, Sampling(max_new_tokens=13))["response_ids"]
    sampling = Sampling(max_new_tokens=13, stop_strings=(str(TOKENIZER.decode(free[0, 4:7])),))
    for steps in range(3, 9):
        said = resumed(pair, rows, sampling, after(steps))
        whole = resumed(pair, said, sampling, never)
        assert whole["response_mask"][0].sum() == 7
        assert whole["response_ids"][0, :7].equal(free[0, :7])
        assert said["ended"][0] == (steps >= 7)


def test_a_row_says_a_token_a_step(pair: Pair) -> None:
    rows = table(prompts(LENGTHS))
    lengths = pair(rows, DRAWN)["response_mask"].sum(1)
    for steps in (0, 1, 4):
        said = resumed(pair, rows, DRAWN, after(steps))
        assert said["response_mask"].sum(1).equal(lengths.clamp(max=steps))
    few = resumed(pair, rows, DRAWN, after(1), at_once=2)
    assert few["response_mask"].sum(1).tolist() == [1, 1, 0, 0, 0, 0, 0]


def test_what_ends_first_is_enough_and_others_may_be_answered_between(pair: Pair) -> None:
    rows = table(prompts(LENGTHS))
    whole = pair(rows, DRAWN)
    said = resumed(pair, rows, DRAWN, lambda ended: int(ended.sum()) >= 3)
    ended, lengths = said["ended"], whole["response_mask"].sum(1)
    assert 3 <= int(ended.sum()) < len(rows)
    assert lengths[ended].max() <= lengths[~ended].min()
    agree(said[ended], whole[ended])
    agree(pair(rows.flip(0), DRAWN), whole.flip(0))
    agree(resumed(pair, said, DRAWN, never), whole)
    agree(resumed(pair, said[~ended], DRAWN, never), whole[~ended])


def test_each_token_has_the_log_prob_of_the_weights_that_drew_it(pair: Pair, tmp_path: Path) -> None:
    """Also behind a prompt whose keys and values vLLM has kept."""
    sequences, sampling = prompts([3, 2 * BLOCK + 9, 40]), Sampling(max_new_tokens=12)
    early = resumed(pair, table(sequences), sampling, after(5))
    before = generating.exported(pair.source, tmp_path / "before")
    generating.learn(pair.source, prompts([5, 3]))
    late = resumed(pair, early, sampling, never)
    now = generating.exported(pair.source, tmp_path / "now")
    assert late["response_ids"][:, :5].equal(early["response_ids"][:, :5])
    old, new = (generating.judged(model, sequences, late, sampling) for model in (before, now))
    torch.testing.assert_close(late["log_probs"][:, :5], old[:, :5], atol=EXACT, rtol=0)
    torch.testing.assert_close(late["log_probs"][:, 5:], new[:, 5:], atol=EXACT, rtol=0)
    assert (old - new).abs().amax(0).min() > 10 * EXACT
