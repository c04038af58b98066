"""Pairs of responses, of which one is preferred."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rlhf_lightning.data.drafts import read_draft
from rlhf_lightning.data.prompts import PromptData

if TYPE_CHECKING:
    from rlhf_lightning.data.drafts import Draft
    from rlhf_lightning.data.format import Format
    from rlhf_lightning.data.record import Record


@dataclass(kw_only=True, eq=False, repr=False)
class PreferenceData(PromptData):
    r"""Pairs for reward and cost models, DPO and its relatives; the end token is added to every response.

    A batch of B pairs has 2B rows: chosen 0, rejected 0, chosen 1, rejected 1, and so on. The two responses
    are texts beside a prompt, or conversations (lists of {role, content} messages, or one text
    `\n\nHuman: ... \n\nAssistant: ...`, as in hh-rlhf) whose last answers are the responses and whose common
    beginning is the prompt. Pairs that say the same twice are counted and dropped.
    """

    chosen_field: str = "chosen"
    """Field that holds the better response."""
    rejected_field: str = "rejected"
    """Field that holds the worse response."""
    margin_field: str | None = None
    """Field that says by how much it is better, a number: the column `margins`."""
    safe_fields: tuple[str, str] | None = None
    """Fields that say whether the better and the worse response do no harm: the column `safe`."""
    max_response_tokens: int = 512
    """Pairs with a longer response are counted and dropped; the end token counts."""

    unit: ClassVar[str] = "pairs"

    def format(self) -> Format:
        """Return how a row becomes a prompt."""
        return replace(super().format(), max_response_tokens=self.max_response_tokens, group=2)

    def draft(self, record: Record, form: Format) -> Draft:
        """Return a row as a draft: a prompt and two responses.

        Raises:
            ValueError: the row lacks a field, or one holds something else.
        """
        fields = {"chosen_field": self.chosen_field, "rejected_field": self.rejected_field}
        chosen: dict[str, bool | float] = {}
        rejected: dict[str, bool | float] = {}
        draft = read_draft(record, form, fields)
        if self.margin_field is not None:
            margin = record.number(self.margin_field, option="margin_field")
            chosen["margins"] = rejected["margins"] = margin
        if self.safe_fields is not None:
            chosen["safe"], rejected["safe"] = (
                record.truth(field, option="safe_fields") for field in self.safe_fields
            )
        return draft.with_values(chosen, rejected)
