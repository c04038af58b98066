"""Files that are there as a whole or not at all."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_lightning.output import whole


@pytest.fixture
def full_at_ten() -> Iterator[None]:
    """A file may have ten bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_it_replaces_one_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("earlier")
    with whole(path) as file:
        file.write("later")
        assert path.read_text() == "earlier"
    assert path.read_text() == "later"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.usefixtures("full_at_ten")
def test_a_disk_that_is_full_keeps_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("earlier")
    with pytest.raises(OSError, match=re.escape(str(path))), whole(path) as file:
        file.write("later than that")
    assert path.read_text() == "earlier"
    assert [*tmp_path.iterdir()] == [path]


def test_nothing_is_left_of_what_fails_as_it_is_written(tmp_path: Path) -> None:
    def fails() -> None:
        with whole(tmp_path / "lines.jsonl") as file:
            file.write("a part")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not [*tmp_path.iterdir()]
