"""What the tests of algorithms share."""

from __future__ import annotations

import pytest

from tests.unit.algos.small import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a model of two small layers."""
    return write_model(tmp_path_factory.mktemp("model"))
