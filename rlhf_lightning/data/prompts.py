"""Prompts from files and data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rlhf_lightning.data.files import IN_MEMORY, Files, RowSplit, listed
from rlhf_lightning.data.format import Format, check_prompt_template
from rlhf_lightning.data.module import RowData
from rlhf_lightning.data.record import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.batch import EncodedRows
    from rlhf_lightning.data.rows import Row


@dataclass(kw_only=True, eq=False, repr=False)
class PromptData(RowData):
    """Prompts from JSON Lines, Parquet or a Hugging Face data set."""

    path: list[str] | str
    """A .jsonl, .ndjson (or .gz), .json or .parquet file, directory, or hub name: openai/gsm8k@main:train; or
    a list of them."""
    val_path: list[str] | str | None = None
    """Validation rows, written like `path`."""
    val_rows: int = 0
    """Hold this many rows at the end of each file of `path` out for validation, instead of `val_path`."""
    limit: int | None = None
    """Use only this many training rows of each file, the first ones."""
    prompt_field: str = "prompt"
    """Field that holds the prompt: a text, or a list of {role, content} messages."""
    prompt_template: str = "{prompt}"
    """Text around a prompt, such as "Question: {prompt} Answer:"; lists of messages stay as they are."""
    chat_template: bool = False
    """Render the prompt with the tokenizer's chat template, ready for the model's turn."""
    chat_template_options: dict[str, bool | int | float | str | list[dict[str, Any]]] = field(
        default_factory=dict
    )
    """Variables of that template, such as {enable_thinking: false}; tools of rows without any."""
    dialogue: bool = False
    """The field holds a whole dialogue "Human: ... Assistant: ..." in one text, as in hh-rlhf: all before its
    last answer is the prompt."""
    max_prompt_tokens: int = 512
    """Rows with longer prompts are counted and dropped."""
    answer_field: str = "answer"
    """Field that becomes the row's `answer`, which rewards compare with: reward_model.ground_truth is
    ground_truth of the object reward_model."""
    data_source_field: str = "data_source"
    """Field that names the row's data source, by which rewards can differ."""
    data_source: str | None = None
    """Data source of rows without that field; by default the name of the file, or of each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._given: RowSplit | None = None
        self._files()
        check_prompt_template(self.prompt_template)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, object]],
        *,
        held_out: Iterable[Mapping[str, object]] = (),
        **options: Any,  # noqa: ANN401 - those of the class
    ) -> Self:
        """Rows that are in memory: dicts in a list, or a `datasets.Dataset`.

        Args:
            rows: to train on.
            held_out: to validate on; or say `val_rows` or `val_path`.
            **options: all but `path`.

        Raises:
            ValueError: there are none, one is no mapping, or an option is outside its range.
        """
        made = cls(path=IN_MEMORY, **options)
        made._given = RowSplit(listed(rows), listed(held_out), IN_MEMORY, IN_MEMORY)
        if not made._given.train:
            raise ValueError(f"{cls.__name__}.from_rows(rows): there are no rows. Give at least one.")
        made._files()
        return made

    def format(self) -> Format:
        """Return how a row becomes a prompt."""
        return Format(
            prompt_field=self.prompt_field,
            prompt_template=self.prompt_template,
            chat_template=self.chat_template,
            template_options=self.chat_template_options,
            dialogue=self.dialogue,
            max_prompt_tokens=self.max_prompt_tokens,
            data_source_field=self.data_source_field,
            data_source=self._files().stem if self.data_source is None else self.data_source,
        )

    def encode(
        self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, name: str, key_offset: int = 0
    ) -> EncodedRows:
        """See `RowData.encode`."""
        if self.answer_field != "answer":
            rows = [self._with_answer(row, where=f"{name}, row {n}") for n, row in enumerate(rows, start=1)]
        return super().encode(rows, tokenizer, name=name, key_offset=key_offset)

    def read(self) -> RowSplit:
        """Return the rows of `path`, split where rows are held out.

        Raises:
            ValueError: a file is missing or damaged, or nothing is left to train on.
        """
        return self._files().read()

    def _with_answer(self, row: Row, *, where: str) -> Row:
        return {**row, "answer": Record(row=row, where=where).take(self.answer_field, option="answer_field")}

    def _files(self) -> Files:
        return Files(
            path=self.path,
            val_path=self.val_path,
            val_rows=self.val_rows,
            limit=self.limit,
            source_field=self.data_source_field if self.data_source is None else None,
            given=self._given,
        )
