"""Prompts from files and data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_lightning.data.encoding import Format
from rlhf_lightning.data.module import RowData, Rows
from rlhf_lightning.data.rows import read_rows


@dataclass(kw_only=True, eq=False, repr=False)
class PromptData(RowData):
    """Prompts from JSON Lines, Parquet or a Hugging Face data set.

    Raises:
        ValueError: an option is outside its range, or two exclude each other.
    """

    path: str
    """A .jsonl, .jsonl.gz or .parquet file, a data set directory, or a hub name: openai/gsm8k@main:train."""
    val_path: str | None = None
    """Validation rows, written like `path`."""
    val_rows: int = 0
    """Hold this many rows at the end of `path` out for validation, instead of `val_path`."""
    limit: int | None = None
    """Use only this many training rows, the first ones."""
    prompt_field: str = "prompt"
    """Field that holds the prompt: a text, or a list of {role, content} messages."""
    prompt_template: str = "{prompt}"
    """Text around a prompt, such as "Question: {prompt} Answer:"; lists of messages stay as they are."""
    chat_template: bool = False
    """Render the prompt with the tokenizer's chat template, ready for the model's turn."""
    max_prompt_tokens: int = 512
    """Rows with longer prompts are counted and dropped."""
    data_source_field: str = "data_source"
    """Field that names the row's data source, by which rewards can differ."""
    data_source: str | None = None
    """Data source of rows without that field; by default the name of the file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.val_path is not None and self.val_rows:
            raise ValueError(
                f"data.val_path={self.val_path} and data.val_rows={self.val_rows}: give one of the two."
            )
        if self.val_rows < 0:
            raise ValueError(f"data.val_rows={self.val_rows}: use 0 to hold out nothing.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit={self.limit}: must be at least 1; leave it out to use all rows.")
        if "{prompt}" not in self.prompt_template:
            raise ValueError(
                f"data.prompt_template={self.prompt_template!r}: it has no {{prompt}}, so all prompts would "
                "be the same. Put {prompt} where the row's prompt goes."
            )

    def format(self) -> Format:
        """Return how a row becomes a prompt."""
        return Format(
            prompt_field=self.prompt_field,
            prompt_template=self.prompt_template,
            chat_template=self.chat_template,
            max_prompt_tokens=self.max_prompt_tokens,
            data_source_field=self.data_source_field,
            data_source=_stem(self.path) if self.data_source is None else self.data_source,
        )

    def read(self) -> Rows:
        """Return the rows of `path`, split where rows are held out.

        Raises:
            ValueError: a file is missing or damaged, or nothing is left to train on.
        """
        rows = read_rows(self.path, limit=None if self.val_rows else self.limit)
        held_out, held_out_name = [], self.path
        if self.val_path is not None:
            held_out, held_out_name = read_rows(self.val_path, option="data.val_path"), self.val_path
        elif self.val_rows:
            if self.val_rows >= len(rows):
                raise ValueError(
                    f"data.val_rows={self.val_rows}: {self.path} has {len(rows)} rows, none is left over. "
                    f"Try --data.val_rows {len(rows) // 10}."
                )
            rows, held_out = rows[: -self.val_rows], rows[-self.val_rows :]
            held_out_name = f"{self.path} (the last {self.val_rows} rows)"
        return Rows(
            train=rows[: self.limit], held_out=held_out, train_name=self.path, held_out_name=held_out_name
        )


def _stem(path: str) -> str:
    return Path(path.partition(":")[0]).name.partition(".")[0].partition("@")[0]
