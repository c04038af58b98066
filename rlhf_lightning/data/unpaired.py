"""Single responses that are desirable or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_lightning.data.drafts import read_draft
from rlhf_lightning.data.prompts import PromptData

if TYPE_CHECKING:
    from rlhf_lightning.data.drafts import Draft
    from rlhf_lightning.data.format import Format
    from rlhf_lightning.data.record import Record


@dataclass(kw_only=True, eq=False, repr=False)
class UnpairedData(PromptData):
    """Responses with a label, for KTO: the column `labels`; the end token is added to every response."""

    response_field: str = "response"
    """Field that holds the response: a text, or a conversation whose last answer it is (CompletionData)."""
    label_field: str = "label"
    """Field that says whether the response is desirable: true or false, 1 or 0."""
    from_pairs: bool = False
    """Read pairs, as PreferenceData does, each as two rows: the chosen response is desirable, the rejected
    one is not. A pair with an over-long response, or with the same twice, is dropped whole."""
    chosen_field: str = "chosen"
    """Field of the desirable response, with `from_pairs`."""
    rejected_field: str = "rejected"
    """Field of the undesirable response, with `from_pairs`."""
    max_response_tokens: int = 512
    """Rows with longer responses are counted and dropped; the end token counts."""

    def format(self) -> Format:
        """Return how a row becomes a prompt."""
        return replace(super().format(), max_response_tokens=self.max_response_tokens)

    @property
    def rows_per_prompt(self) -> int:
        """Neighbouring rows that have one prompt."""
        return 2 if self.from_pairs else 1

    def draft(self, record: Record, form: Format) -> Draft:
        """Return a row as a draft: a prompt and a response, or two with `from_pairs`.

        Raises:
            ValueError: the row lacks a field, or one holds something else.
        """
        if self.from_pairs:
            fields = {"chosen_field": self.chosen_field, "rejected_field": self.rejected_field}
            return read_draft(record, form, fields).with_values({"labels": True}, {"labels": False})
        draft = read_draft(record, form, {"response_field": self.response_field})
        return draft.with_values({"labels": record.truth(self.label_field, option="label_field")})
