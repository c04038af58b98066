"""Which interface has an address."""

from __future__ import annotations

from rlhf_lightning.controller.network import interface


def test_the_interface_of_an_address_is_found() -> None:
    assert interface("127.0.0.1") == "lo"
    assert interface("192.0.2.1") is None, "an address of documentation"
