"""Failures of remote calls, named after the call."""

from __future__ import annotations


class WorkerError(RuntimeError):
    """A remote call failed; the message names role, rank, node and method, and ends with the traceback."""


class WorkerTimeoutError(TimeoutError):
    """A remote call took longer than the strategy allows; the message names what was waited for."""
