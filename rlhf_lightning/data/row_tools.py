"""A row's own `tools`, which the chat template puts into its prompt."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_lightning.data.record import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.drafts import Draft
    from rlhf_lightning.data.format import Format

logger = logging.getLogger(__name__)

TOOLS = "tools"
"""The field, and the variable of chat templates."""


def forms_of_rows(
    drafts: Sequence[Draft], tokenizer: PreTrainedTokenizerBase, form: Format, *, name: str
) -> list[Format]:
    """The format of each row: with a chat template its own tools come before those of the options.

    Warns where rows have tools, and the template knows of none.

    Raises:
        ValueError: the field holds something else.
    """
    having = {n for n, draft in enumerate(drafts) if form.chat_template and not _none(draft.row.get(TOOLS))}
    if having and TOOLS not in str(tokenizer.chat_template):
        logger.warning(
            "%s: %d of %d rows have a field 'tools', for which the chat template of %s has no place: the "
            "model does not read of them. Write them into a system prompt, or take a template that has one",
            name,
            len(having),
            len(drafts),
            tokenizer.name_or_path,
        )
        having = set()
    return [
        replace(form, template_options={**form.template_options, TOOLS: _tools(draft)})
        if n in having
        else form
        for n, draft in enumerate(drafts)
    ]


def _none(found: object) -> bool:
    """Whether a field holds no tools: nothing, an empty list, or a JSON text of either."""
    return not found or (isinstance(found, str) and found.strip() in ("", "[]", "null"))


def _tools(draft: Draft) -> list[object]:
    """The tools of a row: a list of objects, or a JSON text of one, as data sets store it.

    Raises:
        ValueError: the field holds something else.
    """
    found = draft.row[TOOLS]
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            found = None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise Record(row=draft.row, where=draft.where).wrong(
            TOOLS,
            "the chat template renders tools, a list of {type, function} objects or a JSON text of one. If "
            "this is something else, rename the field",
        )
    return found
