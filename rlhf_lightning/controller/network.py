"""What addresses tell: which interface of this machine has one."""

from __future__ import annotations

import psutil


def interface(address: str) -> str | None:
    """The network interface that has this address; None where none has."""
    return next((name for name, has in _interfaces().items() if address in has), None)


def _interfaces() -> dict[str, set[str]]:
    return {name: {str(each.address) for each in has} for name, has in psutil.net_if_addrs().items()}
