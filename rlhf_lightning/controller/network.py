"""What addresses tell: which interface of this machine has one, and which are surely of two clusters."""

from __future__ import annotations

import socket

import psutil


def interface(address: str) -> str | None:
    """The network interface that has this address; None where none has."""
    return next((name for name, has in _interfaces().items() if address in has), None)


def are_apart(one: str, other: str) -> bool:
    """Whether these, host:port, are surely of two clusters: a machine has many names and addresses.

    So they are with other ports, or if one is of this machine and the other is not.
    """
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    if port != other_port:
        return True
    found, others = _addresses(host), _addresses(other_host)
    return bool(found and others) and _is_here(found) != _is_here(others)


def _interfaces() -> dict[str, set[str]]:
    return {name: {str(each.address) for each in has} for name, has in psutil.net_if_addrs().items()}


def _addresses(host: str) -> set[str]:
    """Of a host; none where nobody knows its name."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()


def _is_here(addresses: set[str]) -> bool:
    """Whether one of them is this machine's; it may have more of 127.0.0.0/8 than an interface says."""
    here = set().union(*_interfaces().values())
    return any(each in here or each.startswith("127.") for each in addresses)
