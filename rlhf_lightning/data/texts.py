"""Plain texts, packed into blocks: what a model was pre-trained on."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlhf_lightning.data.batch import EncodedRows
from rlhf_lightning.data.files import Files, RowSplit
from rlhf_lightning.data.module import RowData
from rlhf_lightning.data.record import Record
from rlhf_lightning.data.tokenizer import end_token, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.rows import Row

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, repr=False)
class TextData(RowData):
    """Blocks of text for the pre-training loss (ptx), or for training on texts alone.

    The documents stand one after the other, each with the end token after it, and are cut into blocks of
    `block_tokens`: no token is padding but those after a shorter last block, which is left out where it has
    one token. The first token of a block is its prompt and the others are its response, so N tokens in n
    blocks are N - n predictions. Positions count from the beginning of a block, and a token attends to all
    before it in the block, those of other documents too.
    """

    path: list[str] | str
    """A .jsonl, .ndjson (or .gz), .json or .parquet file, directory, or hub name, or a list of them; a row is
    a document."""
    val_path: list[str] | str | None = None
    """Validation documents, written like `path`."""
    val_rows: int = 0
    """Hold this many documents at the end of each file out for validation, instead of `val_path`."""
    limit: int | None = None
    """Use only this many training documents of each file, the first ones."""
    text_field: str = "text"
    """Field that holds the text."""
    block_tokens: int = 512
    """Tokens of a block, at least 2."""

    unit: ClassVar[str] = "blocks"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._files()
        if self.block_tokens < 2:
            raise ValueError(
                f"data.block_tokens={self.block_tokens}: a block has a token to begin with "
                "and at least one to predict. Try 512."
            )

    def read(self) -> RowSplit:
        """Return the documents of `path`, split where some are held out.

        Raises:
            ValueError: a file is missing or damaged, or nothing is left to train on.
        """
        return self._files().read()

    def encode(
        self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, name: str, key_offset: int = 0
    ) -> EncodedRows:
        """Pack all documents into blocks.

        Raises:
            ValueError: a row has no text, or a text no tokens.
        """
        tokens = self._tokens(rows, tokenizer, name)
        starts = range(0, len(tokens) - 1, self.block_tokens)
        logger.info("%s: %d tokens of %d texts in %d blocks", name, len(tokens), len(rows), len(starts))
        source = self._files().stem
        return EncodedRows(
            rows=[{"prompt": tokenizer.decode(tokens[at]), "data_source": source} for at in starts],
            prompts=[tokens[at : at + 1] for at in starts],
            responses=[tokens[at + 1 : at + self.block_tokens] for at in starts],
            key_offset=key_offset,
        )

    def check_lengths(self, *, positions: int, new_tokens: int, generates: bool) -> None:
        """Refuse blocks that the model cannot take, or answers to their first tokens; after `setup`."""
        if generates and new_tokens >= positions:
            raise ValueError(
                f"sampling.max_new_tokens={new_tokens}: with the prompt, a block's first token, that makes "
                f"{new_tokens + 1}, and the model has {positions} positions. "
                f"Try sampling.max_new_tokens={positions - 1}."
            )
        if not generates and self.block_tokens > positions:
            raise ValueError(
                f"{self.typed}.block_tokens={self.block_tokens}: the model has {positions} positions. "
                f"Try --{self.typed}.block_tokens {positions}."
            )

    def _tokens(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, name: str) -> array[int]:
        """All documents in a row, with the end token after each."""
        records = [Record(row=row, where=f"{name}, row {n}") for n, row in enumerate(rows, start=1)]
        texts = [record.text(self.text_field, option="text_field", noun="a document") for record in records]
        end, tokens = end_token(tokenizer), array("i")
        for record, ids in zip(records, tokenize(texts, tokenizer, special=True), strict=True):
            if not ids:
                raise ValueError(f"{record.where}: the text has no tokens. Remove the row.")
            tokens.extend(ids)
            if ids[-1] != end:
                tokens.append(end)
        return tokens

    def _files(self) -> Files:
        return Files(path=self.path, val_path=self.val_path, val_rows=self.val_rows, limit=self.limit)
