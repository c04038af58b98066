"""Addresses of stores, such as `s3://bucket/run`, which are no directories."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"[\w.+-]{2,}:(/|$)")
"""How one begins; a Path has one slash of the two, and its parent maybe none."""


def check_local(path: object, *, option: str) -> None:
    """Refuse the address of a store as a directory: files would go below a new folder such as `s3:`.

    Args:
        path: a text or a Path, as it was typed.
        option: where it was typed.
    """
    if _ADDRESS.match(str(path)):
        raise ValueError(
            f"{option}={path}: is in a store, and files are written to a disk. Type a directory that all "
            "nodes have, such as one where the store is mounted."
        )
