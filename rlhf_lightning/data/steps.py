"""Solutions in steps, each with a label."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_lightning.data.drafts import Answer
from rlhf_lightning.data.prompts import PromptData

if TYPE_CHECKING:
    from rlhf_lightning.data.drafts import Draft
    from rlhf_lightning.data.format import Format
    from rlhf_lightning.data.record import Record


@dataclass(kw_only=True, eq=False, repr=False)
class StepData(PromptData):
    """Prompts and solutions for process reward models: the columns `step_mask` and `step_labels`.

    The response is all steps with the separator between them, and the end token, as a model writes them.
    Every step is tokenised by itself, so that no token belongs to two steps. Its label is at its last token,
    the separator's, that of the last step at the end token: where answers are scored.
    """

    steps_field: str = "steps"
    """Field that holds the steps, a list of texts."""
    labels_field: str = "labels"
    """Field that holds a number from 0 (wrong) to 1 (right) for each step, or true or false."""
    separator: str = "\n"
    """Text between steps."""
    max_response_tokens: int = 512
    """Rows with longer responses are counted and dropped; the end token counts."""

    def format(self) -> Format:
        """Return how a row becomes a prompt."""
        return replace(super().format(), max_response_tokens=self.max_response_tokens)

    def draft(self, record: Record, form: Format) -> Draft:
        """Return a row as a draft: a prompt, and a response in steps.

        Raises:
            ValueError: the row lacks a field, one holds something else, steps and labels differ in number, or
                a step holds the separator.
        """
        draft = super().draft(record, form)
        steps = record.take(self.steps_field, option="steps_field")
        if not isinstance(steps, list) or not steps or not all(_is_step(step) for step in steps):
            raise record.wrong(self.steps_field, "steps are a list of texts, none of them blank")
        labels = record.take(self.labels_field, option="labels_field")
        if not isinstance(labels, list) or not all(_is_label(label) for label in labels):
            raise record.wrong(
                self.labels_field, "labels are a list of numbers from 0 to 1, or of true and false"
            )
        if len(steps) != len(labels):
            raise ValueError(
                f"{record.where}: {len(steps)} steps in {self.steps_field!r} and {len(labels)} labels in "
                f"{self.labels_field!r}. Give one label a step."
            )
        self._check_ends(record, steps)
        pieces = (*(f"{step}{self.separator}" for step in steps[:-1]), steps[-1])
        return replace(draft, answers=(Answer(pieces=pieces, labels=tuple(map(float, labels))),))

    def _check_ends(self, record: Record, steps: list[str]) -> None:
        """Refuse steps that hold the separator: a model is asked for a number at each of them."""
        for number, step in enumerate(steps if self.separator else (), start=1):
            behind = self.separator if number < len(steps) else ""
            if 0 <= f"{step}{behind}".find(self.separator) < len(step):
                raise ValueError(
                    f"{record.where}: step {number} of {self.steps_field!r}, {step[:60]!r}, holds the "
                    f"separator {self.separator!r}. Answers are scored at each, and one within a step "
                    "has no label. Divide the step there, strip it, or type another --data.separator, and "
                    "where the model scores the same --algo.reward.separator."
                )


def _is_step(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_label(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1
