"""The GPU that the tests of this folder compute on."""

from __future__ import annotations

import pytest
import torch

# What CUDA starts and sets for good (threads, a variable) is there before a test is looked at.
if torch.cuda.is_available():
    torch.cuda.init()


@pytest.fixture
def gpu() -> torch.device:
    """The first one."""
    return torch.device("cuda", 0)
