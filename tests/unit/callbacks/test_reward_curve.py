from __future__ import annotations

from rlhf_lightning.callbacks.reward_curve import running_mean, with_point


def test_running_mean() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_a_step_that_comes_again_replaces_what_followed_it() -> None:
    curve = [(2, 0.5), (4, 1.0), (6, 1.5)]
    assert with_point(curve, 8, 2.0) == [*curve, (8, 2.0)]
    assert with_point(curve, 4, 2.0) == [(2, 0.5), (4, 2.0)]
