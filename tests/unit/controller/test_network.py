"""Which interface has an address, and which addresses are surely not of one cluster."""

from __future__ import annotations

import socket

import pytest

from rlhf_lightning.controller.network import are_apart, interface

NAMES = {
    "head": ["10.0.0.1"],
    "head.rack": ["10.0.0.1", "10.0.1.1"],
    "other": ["10.0.0.2"],
    "me": ["127.0.1.1"],
}


def test_the_interface_of_an_address_is_found() -> None:
    assert interface("127.0.0.1") == "lo"
    assert interface("192.0.2.1") is None, "an address of documentation"


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ("head:6379", "10.0.0.1:6379", False),
        ("head:6379", "10.0.0.1:6380", True),
        ("head:6379", "head.rack:6379", False),
        ("head:6379", "other:6379", False),
        ("head:6379", "unknown:6379", False),
        ("me:6379", "127.0.0.1:6379", False),
        ("localhost:6379", "[::1]:6379", False),
        ("head:6379", "127.0.0.1:6379", True),
    ],
)
def test_clusters_are_told_apart_where_that_is_sure(
    monkeypatch: pytest.MonkeyPatch, one: str, other: str, *, apart: bool
) -> None:
    def resolve(host: str, port: None) -> list[tuple[object, ...]]:
        if host == "unknown":
            raise socket.gaierror(-2, "Name or service not known")
        given = {"localhost": ["127.0.0.1"]} | NAMES
        return [(0, 0, 0, "", (address, 0)) for address in given.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert are_apart(one, other) is apart
    assert are_apart(other, one) is apart
