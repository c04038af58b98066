"""LastCheckpoint: what it is given; `tests/ray` saves and resumes with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.callbacks import LastCheckpoint


@pytest.mark.parametrize("number", [0, -1])
def test_never_is_no_number_of_iterations(number: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"every_n_steps={number}\): must be at least 1"):
        LastCheckpoint(tmp_path, every_n_steps=number)
