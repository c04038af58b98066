"""Short names on the command line: public classes of a folder in lower case, strategies' own names."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from difflib import get_close_matches
from pathlib import Path

FOLDERS = {
    "algo": "rlhf_lightning.algos",
    "strategy": "rlhf_lightning.strategies",
    "data": "rlhf_lightning.data",
}
"""Where the short names of each option are looked up."""
_FILE = re.compile(r"(.+)\.py(?::(\w+))?")
"""A file of Python, and what may be named in it."""
_ROWS = (".jsonl", ".json", ".parquet", ".csv")
"""How files of rows end, there or not."""
_ENGINES = ("ddp", "fsdp", "deepspeed", "zero", "megatron")
"""How names of strategies begin elsewhere that are engines here."""


def path_in_file(name: str, *, member: str) -> str:
    """The import path that is meant by a file, `a/b.py` or `a/b.py:Mine`; empty for other names.

    Args:
        name: as it was typed.
        member: what stands for the class or function where none was typed.
    """
    found = _FILE.fullmatch(name)
    if found is None:
        return ""
    place = Path(found[1])
    parts = place.parts[-1:] if place.is_absolute() or ".." in place.parts else place.parts
    return ".".join((*parts, found[2] or member))


def class_path(option: str, name: str) -> str:
    """The class path behind a short name; a name with a dot is one already.

    Raises:
        ValueError: the name is unknown (the message lists the known), or it is that of a file.
    """
    is_file = option == "data" and (Path(name).is_file() or name.endswith(_ROWS))
    if mine := path_in_file(name, member="Mine"):
        raise ValueError(
            f"--{option} {name}: is a file. Type the import path of a class in it, such as {mine}."
        )
    if "." in name and not is_file:
        return name
    known = choices(option)
    if name.lower() in known:
        return f"{FOLDERS[option]}.{known[name.lower()].__name__}"
    if is_file:
        raise ValueError(f"--data {name}: is a file. Type the kind too: --data promptdata --data.path {name}")
    typed = {cls.__name__.lower(): short for short, cls in known.items()} | {short: short for short in known}
    near = meant(*(typed[each] for each in get_close_matches(name.lower(), typed, n=1)))
    if option == "strategy" and name.lower().startswith(_ENGINES):
        near += " A strategy places models; --strategy.settings.engine fsdp, zero or megatron trains them."
    raise ValueError(
        f"--{option} {name}: unknown.{near} Known: "
        f"{', '.join(sorted(known))}, or the class path of your own, such as my_package.my_module.Mine."
    )


def imported(path: str) -> type | None:
    """The class of a class path; None where its module is not imported, or has no such class."""
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def meant(*names: str) -> str:
    """The question whether one of these was meant, behind a space; empty for none."""
    return f" Did you mean {' or '.join(names)}?" if names else ""


def choices(option: str) -> dict[str, type]:
    """The classes that an option takes, by short name."""
    module = importlib.import_module(FOLDERS[option])
    public = (getattr(module, name) for name in module.__all__)
    return {_short(value): value for value in public if _is_choice(value)}


def _short(cls: type) -> str:
    """What the user types for a class: its own `strategy_name` if it has one, else its name in lower case."""
    return str(vars(cls).get("strategy_name", cls.__name__.lower()))


def _is_choice(value: object) -> bool:
    """Whether this is a class to be chosen: Lightning's three kinds have `setup`, and their helpers none."""
    return isinstance(value, type) and not inspect.isabstract(value) and hasattr(value, "setup")
