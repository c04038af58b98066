from __future__ import annotations

import pytest
import torch

from tests.unit.functional.cases import DTYPES, MASKS


@pytest.fixture(params=list(MASKS))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param
