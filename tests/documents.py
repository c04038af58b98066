"""The commands that documents tell a reader to type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.conftest import ROOT

BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(name: str | Path) -> list[str]:
    """Lines of the bash blocks of a document, continued lines joined, comments cut."""
    blocks = BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]
