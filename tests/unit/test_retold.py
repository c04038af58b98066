"""Errors of the user are told again with what only the caller knows; all others pass."""

from __future__ import annotations

import pytest

from rlhf_lightning.retold import retold


def test_the_message_is_another_one_and_the_first_its_cause() -> None:
    first = ValueError("path='x': is not there.")
    with (
        pytest.raises(ValueError, match=r"^critic\.path='x': is not there\.$") as found,
        retold("critic.{}".format),
    ):
        raise first
    assert found.value.__cause__ is first


def test_an_error_that_stays_as_it_was_is_the_same_one() -> None:
    first = ValueError("batch_size=0")
    with pytest.raises(ValueError, match=r"^batch_size=0$") as found, retold(str):
        raise first
    assert found.value is first


def test_other_errors_are_no_mistakes_of_the_user() -> None:
    with pytest.raises(KeyError, match="x"), retold(lambda _: "told"):
        raise KeyError("x")
