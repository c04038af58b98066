"""Options of algorithms that contradict themselves or others are refused as the algorithm is made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlhf_lightning.algos import DAPO, GRPO, GSPO, KTO, PPO, RLOO, OnlineDPO, ReinforcePP, ReMax, SafeRLHF
from rlhf_lightning.functional import Overlong
from rlhf_lightning.running import KLPenalty, Scaling
from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers import Actor, Opponent, Reference


def test_a_penalty_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl\.coef=-1"):
        KLPenalty(coef=-1)
    with pytest.raises(ValueError, match="must be above 0"):
        KLPenalty(target=0.0)
    with pytest.raises(
        ValueError, match=r"^kl\.target=0\.1 with kl\.coef=0: .* 0 stays 0\. Try kl\.coef 0\."
    ):
        KLPenalty(coef=0, target=0.1)
    assert KLPenalty(coef=0.0).coef == 0
    with pytest.raises(ValueError, match=r"^kl\.horizon=-1: is a number of rows"):
        KLPenalty(horizon=-1)
    with pytest.raises(ValueError, match="reward_clip=0"):
        Scaling(reward_clip=0.0)
    with pytest.raises(ValueError, match=r"^Reference\(decay=2\.0\): is a share"):
        Reference(decay=2.0)
    for options in ({"every": 0, "decay": 0.0}, {"every": 3}):
        with pytest.raises(ValueError, match=rf"^Reference\(every={options['every']}, decay="):
            Reference(**options)
    with pytest.raises(ValueError, match=r"^Opponent\(decay=-1\.0\): is a share"):
        Opponent(decay=-1.0)
    with pytest.raises(ValueError, match=r"^Opponent\(every=2, decay=None\): it follows"):
        Opponent(decay=None, every=2)


def drawing(**options: float) -> Actor:
    """One whose answers are drawn so."""
    return Actor(path="embedded", sampling=Sampling(**options))  # type: ignore[arg-type]


GREEDY = drawing(temperature=0)
SAME = r"with actor\.sampling\.temperature=0: .* the same answer"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PPO(gamma=1.5), "gamma=1.5"),
        (lambda: ReinforcePP(gamma=-0.1), "gamma=-0.1"),
        (lambda: ReMax(form="verl", clip=5.0), "form='verl'"),
        (lambda: ReMax(clip=0.0), "a limit must be above 0"),
        (lambda: DAPO(overlong=Overlong(buffer=1000)), "buffer=1000"),
        (lambda: KTO(mini_batch_size=1), r"^mini_batch_size=1: .* Try 0, the whole batch\."),
        (lambda: GRPO(group_size=1), r"group_size=1.*Try 8\."),
        (lambda: ReinforcePP(group_size=0), r"group_size=0.*Try 1, or 8\."),
        (lambda: RLOO(actor=GREEDY), rf"^group_size=8, {SAME}"),
        (lambda: ReinforcePP(actor=GREEDY, group_size=2), rf"^group_size=2, {SAME}"),
        (lambda: ReMax(group_size=0), r"group_size=0.*Try 1, or 4\."),
        (lambda: ReMax(actor=GREEDY), rf"^ReMax compares drawn answers with the greedy one, {SAME}"),
        (lambda: OnlineDPO(actor=GREEDY), rf"^OnlineDPO compares two answers, {SAME}"),
        (
            lambda: GRPO(actor=drawing(top_k=1)),
            r"^group_size=8, with actor\.sampling\.top_k=1: .* Try top_k 0\.$",
        ),
        (lambda: OnlineDPO(actor=drawing(min_p=1.0)), r"min_p=1\.0: greedy .* Try min_p 0\.0\.$"),
        (lambda: SafeRLHF(multiplier=0), r"multiplier=0, multiplier_max=5\.0"),
        (lambda: SafeRLHF(multiplier=6), r"multiplier=6, multiplier_max=5\.0"),
        (lambda: SafeRLHF(window=0), "window=0"),
        (lambda: SafeRLHF(scaling=Scaling(rewards=True)), "^scaling: "),
    ],
)
def test_what_no_estimator_takes_is_refused_at_once(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_ratio_of_whole_answers_takes_no_rounded_log_probs() -> None:
    with pytest.raises(ValueError, match=r"^GSPO with actor\.dtype=bfloat16: .*recompute_log_probs true\.$"):
        GSPO(actor=Actor(dtype="bfloat16")).setup("fit")
    for actor in (Actor(), GSPO(actor=Actor(dtype="bfloat16", recompute_log_probs=True)).actor):
        with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):  # so far it got
            GSPO(actor=actor).setup("fit")
    assert GSPO().actor.recompute_log_probs


def test_what_keeps_more_than_the_likeliest_token_is_taken() -> None:
    for options in ({"top_k": 2}, {"min_p": 0.99}, {"top_p": 0.01}, {"temperature": 0.01}):
        assert GRPO(actor=drawing(**options)).group_size == 8
