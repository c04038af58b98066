"""What a row of an Arrow table (Parquet, `datasets.Dataset`) was before it came there.

All objects of a column have the same fields in a table, null where a row had none:

    written     {"arguments": {"city": "Ulm"}}                          {"arguments": {"x": 1}}
    read        {"arguments": {"city": "Ulm", "x": null}}               {"arguments": {"city": null, "x": 1}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_lightning.data.rows import Row

_CHAT_FIELDS = ("tools", "tool_calls")
"""Fields of a row or a message that chat templates write out whole."""


def without_nulls(row: Mapping[str, object]) -> Row:
    """A row whose tools and {role, content} messages have no null fields, apart from a message's content.

    Other fields stay, null ones too.
    """
    return {name: _without(value, whole=name in _CHAT_FIELDS) for name, value in row.items()}


def _without(value: object, *, whole: bool) -> object:
    """The value; with `whole` each object in it loses its null fields, else those of messages do."""
    if isinstance(value, list):
        return [_without(item, whole=whole) for item in value]
    if not isinstance(value, dict):
        return value
    drops = whole or {"role", "content"} <= value.keys()
    return {
        name: _without(item, whole=whole or name in _CHAT_FIELDS)
        for name, item in value.items()
        if item is not None or not drops or (name == "content" and not whole)
    }
