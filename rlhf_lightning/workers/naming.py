"""Errors of models and judges name the field that holds them, since roles are called what users like."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

from rlhf_lightning.retold import retold


def naming_role(name: str) -> AbstractContextManager[None]:
    """Put the role's name before errors about `path` or `lora`, so that they name an option of it."""
    return retold(lambda said: f"{name}.{said}" if said.startswith(("path=", "lora")) else said)


def found_before() -> AbstractContextManager[None]:
    """Add to errors about what a worker does not find that the controller has found it."""
    return retold(lambda said: f"{said} The controller has found it: each node needs it (docs/cluster.md).")


def naming_judge(name: str, kind: str) -> AbstractContextManager[None]:
    """Let errors about a reward or a cost name the field that holds it, where that is called otherwise.

    Args:
        name: of the field.
        kind: what errors call it, at their beginning and in options.
    """
    return retold(lambda said: re.sub(rf"^{kind}\b|(?<=--algo\.){kind}\b", name, said))
