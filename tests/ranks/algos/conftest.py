"""What the tests of algorithms share."""

from __future__ import annotations

from tests.unit.algos.conftest import model

__all__ = ["model"]
