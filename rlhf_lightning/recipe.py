"""A recipe of another system typed as it is: each of its options on a line, with what to type here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

from rlhf_lightning.usage import TWO_DASHES, option_error

_HEAD = "unrecognized arguments: "
"""What argparse says before the words that belong to no option."""
_OPTION = re.compile(r"--[\w.-]+(=.*)?|\+*[\w.]+=.*")
"""How an option begins, in the form of TRL and OpenRLHF or in that of verl; other words are its values."""


def option_errors(message: str, owners: Mapping[str, type], *, elsewhere: Mapping[str, str]) -> str:
    """An error of the parser: `option_error` of each option that it does not know, a line for each."""
    words = message.removeprefix(_HEAD).split() if message.startswith(_HEAD) else []
    starts = [place for place, word in enumerate(words) if _OPTION.fullmatch(word)]
    if len(starts) < 2:
        return option_error(message, owners, elsewhere=elsewhere)
    typed = [" ".join(words[start:end]) for start, end in pairwise(sorted({0, *starts, len(words)}))]
    told = [option_error(f"{_HEAD}{each}", owners, elsewhere=elsewhere) for each in typed]
    dashes = f" {TWO_DASHES}" * any(TWO_DASHES in each for each in told)
    lines = [each.removeprefix(_HEAD).replace(f" {TWO_DASHES}", "") for each in told]
    return "\n  ".join([f"{len(lines)} unknown options.{dashes}", *lines])
