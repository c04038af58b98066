"""Tasks that need no file: the embedded one, sorting digits, and those of the reasoning-gym library.

`Sort 583172: ` is answered by `123578`: learned in minutes by a small model, verified by comparing texts.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from rlhf_lightning.data.files import RowSplit
from rlhf_lightning.data.format import Format, check_prompt_template
from rlhf_lightning.data.module import RowData
from rlhf_lightning.extras import import_extra

if TYPE_CHECKING:
    from rlhf_lightning.data.rows import Row

SORT_DIGITS = "sort_digits"
_HELD_OUT_SHARE = 10
"""One in ten digit strings, chosen by its checksum, is never trained on, whatever the seed."""


@dataclass(kw_only=True, eq=False, repr=False)
class TaskData(RowData):
    """The embedded task: sort the digits of a number."""

    num_rows: int = 8192
    """Training rows of an epoch."""
    num_val_rows: int = 256
    """Validation rows; no training row has their digits."""
    min_digits: int = 6
    """Fewest digits of a number."""
    max_digits: int = 6
    """Most digits of a number."""
    completions: bool = False
    """Batches hold the sorted digits as responses too, for supervised fine-tuning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.min_digits <= self.max_digits:
            raise ValueError(
                f"data.min_digits={self.min_digits}, data.max_digits={self.max_digits}: "
                "the least is 2, and not above the most. Try 6 and 6."
            )
        _check_numbers(self.num_rows, self.num_val_rows)

    def format(self) -> Format:
        """Return how a row becomes a prompt."""
        return Format(data_source=SORT_DIGITS, response_field="answer" if self.completions else None)

    def read(self) -> RowSplit:
        """Return freshly generated rows."""
        span = (self.min_digits, self.max_digits)
        return RowSplit(
            train=[sort_digits(self.effective_seed, index, digits=span) for index in range(self.num_rows)],
            held_out=[
                sort_digits(self.effective_seed, i, digits=span, held_out=True)
                for i in range(self.num_val_rows)
            ],
            train_name=SORT_DIGITS,
            held_out_name=f"{SORT_DIGITS} (held out)",
        )


def sort_digits(seed: int, index: int, *, digits: tuple[int, int] = (6, 6), held_out: bool = False) -> Row:
    """Return one row of the task, a pure function of its arguments.

    Args:
        seed: of all rows.
        index: of this row.
        digits: the fewest and the most digits.
        held_out: draw from the digit strings that are kept for validation.

    Example:
        >>> sorted(sort_digits(0, 0))
        ['answer', 'data_source', 'prompt']
    """
    rng = random.Random(f"{seed}/{index}/{held_out}")  # noqa: S311
    while True:
        text = "".join(rng.choices("0123456789", k=rng.randint(*digits)))
        if (zlib.crc32(text.encode()) % _HELD_OUT_SHARE == 0) == held_out:
            return {"prompt": f"Sort {text}: ", "answer": "".join(sorted(text)), "data_source": SORT_DIGITS}


@dataclass(kw_only=True, eq=False, repr=False)
class ReasoningGymData(RowData):
    """A task of the reasoning-gym library, which also verifies the answers (reward `reasoning_gym`)."""

    task: str = "spell_backward"
    """Name of the task in the library."""
    options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of the task, such as {max_word_len: 5}."""
    num_rows: int = 8192
    """Training rows of an epoch."""
    num_val_rows: int = 256
    """Validation rows at most: those whose question is a training row's too are left out."""
    prompt_template: str = "{prompt}"
    """Text around a question."""
    chat_template: bool = False
    """Render the question with the tokenizer's chat template."""
    chat_template_options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Variables of that template, such as {enable_thinking: false}."""
    max_prompt_tokens: int = 512
    """Rows with longer prompts are counted and dropped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_numbers(self.num_rows, self.num_val_rows)
        check_prompt_template(self.prompt_template)

    def format(self) -> Format:
        """Return how a row becomes a prompt."""
        return Format(
            prompt_field="question",
            prompt_template=self.prompt_template,
            chat_template=self.chat_template,
            template_options=self.chat_template_options,
            max_prompt_tokens=self.max_prompt_tokens,
        )

    def read(self) -> RowSplit:
        """Return freshly generated rows.

        Raises:
            ValueError: the library is not installed, or knows no such task or option.
        """
        gym = import_extra("reasoning_gym", extra="tasks", purpose=f"data.task={self.task}")
        if self.task not in (known := gym.factory.DATASETS):
            raise ValueError(
                f"data.task={self.task}: reasoning-gym has no such task; it has: {', '.join(sorted(known))}"
            )
        size = self.num_rows + self.num_val_rows
        try:
            entries = gym.create_dataset(self.task, seed=self.effective_seed, size=size, **self.options)
        except (TypeError, AssertionError) as err:
            raise ValueError(
                f"data.options={self.options}: the task {self.task} refuses them ({err})."
            ) from err
        beside = {"data_source": self.task, "task_options": dict(self.options)}  # the verifier's too
        rows = [cast("Row", {**entries[index], **beside}) for index in range(size)]
        train = rows[: self.num_rows]
        seen = {row["question"] for row in train}
        held_out = [row for row in rows[self.num_rows :] if row["question"] not in seen]
        return RowSplit(
            train=train, held_out=held_out, train_name=self.task, held_out_name=f"{self.task} (held out)"
        )


def _check_numbers(num_rows: int, num_val_rows: int) -> None:
    if num_rows < 1 or num_val_rows < 0:
        raise ValueError(
            f"data.num_rows={num_rows}, data.num_val_rows={num_val_rows}: at least 1 training row and no "
            "negative number. Try 8192 and 256."
        )
