"""The base class of data modules: from raw rows to resumable loaders of padded batches."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from lightning.pytorch import LightningDataModule
from torch import Generator
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.batch import Collate, EncodedRow, EncodedRows, pad_token_id
from rlhf_lightning.data.drafts import Draft, read_draft
from rlhf_lightning.data.encoding import encode_drafts
from rlhf_lightning.data.files import RowSplit
from rlhf_lightning.data.format import Format
from rlhf_lightning.data.loader import RowLoader
from rlhf_lightning.data.record import Record
from rlhf_lightning.data.sampler import HELD_OUT, DrawnRows, EpochSampler, FirstRows
from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.field_types import check_types
from rlhf_lightning.spec import run_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_lightning.data.rows import Row

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, repr=False)
class RowData(LightningDataModule, ABC):
    """Batches of rows; a subclass reads the rows, and may say what a row's prompt and response are.

    Everything that can be wrong with the data is refused in `setup`, which runs before any worker starts.
    """

    batch_size: int = 32
    """Rows (prompts) per iteration; the last batch of an epoch may be smaller."""
    drop_last: bool = False
    """Leave out a smaller last batch; its rows are drawn in other epochs, and without `shuffle` never."""
    shuffle: bool = True
    """Draw a new order for every epoch; false: the order of the file."""
    seed: int | None = None
    """Seed of the order, and of generated rows; None: the seed of the run."""
    tokenizer: str | None = None
    """Directory or hub name of a tokenizer; None: the algorithm's."""
    num_workers: int = 0
    """Processes that make training batches while the step before runs; 0 makes each when it is asked for."""

    unit: ClassVar[str] = "rows"
    """What `batch_size` counts."""

    def __post_init__(self) -> None:
        super().__init__()
        self.typed = "data"
        """How its options begin where they are typed."""
        check_types(self, name="data")
        if self.batch_size < 1:
            raise ValueError(f"data.batch_size={self.batch_size}: a batch has at least 1 row. Try 32.")
        if not 0 <= self.effective_seed < 2**31:
            raise ValueError(f"data.seed={self.seed}: must lie in [0, 2**31). Try 0.")
        if self.num_workers < 0:
            raise ValueError(f"data.num_workers={self.num_workers}: use 0 for no process beside the run's.")
        if self.num_workers and self._draws:
            raise ValueError(
                f"data.num_workers={self.num_workers}: {type(self).__name__}.draw is asked for each row when "
                "its batch is, and a worker would ask before its time. Try --data.num_workers 0."
            )
        self._train: EncodedRows | None = None
        self._held_out: EncodedRows | None = None
        self._encoded_by: PreTrainedTokenizerBase | None = None
        self._name = ""
        self._collate = Collate(pad_token_id=0)

    @property
    def effective_seed(self) -> int:
        """The seed of the data: `seed`, or that of the run."""
        return run_seed() if self.seed is None else self.seed

    def draw(self, number: int, generator: Generator) -> int:
        """Choose a row to train on, in a subclass that overrides it; else each comes once in an epoch.

        It is asked for the rows of a batch once the step before has ended, so that it may read what that
        has learned. An epoch has as many draws as there are rows.

        Args:
            number: of the draw, counted on from epoch to epoch, and after a resume.
            generator: for random choices, the same for the same number and seed of the data.

        Returns:
            A row's place in `train_rows`; where rows are pairs, the pair's place among pairs.
        """
        return number % len(self._encoded())

    @property
    def _draws(self) -> bool:
        return type(self).draw is not RowData.draw

    @abstractmethod
    def read(self) -> RowSplit:
        """Return the raw rows."""

    def format(self) -> Format:
        """Return how a row becomes a prompt."""
        return Format()

    def draft(self, record: Record, form: Format) -> Draft:
        """Return a row as a draft: its prompt, and its response where there is one.

        Raises:
            ValueError: the row lacks a field, or one holds something else.
        """
        response = {} if form.response_field is None else {"response_field": form.response_field}
        return read_draft(record, form, response)

    def drafts(self, record: Record, form: Format) -> list[Draft]:
        """Return what a row becomes in the data, each counted as a row: one draft, or several."""
        return [self.draft(record, form)]

    def encode(
        self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, name: str, key_offset: int = 0
    ) -> EncodedRows:
        """Encode all rows, and drop what is too long.

        Args:
            rows: as they were read.
            tokenizer: of the model.
            name: where the rows come from, for messages.
            key_offset: added to the keys to make the row ids.

        Raises:
            ValueError: a row lacks a field or holds something else than it should, or none is short enough.
        """
        form = self.format()
        records = (Record(row=row, where=f"{name}, row {n}") for n, row in enumerate(rows, start=1))
        drafts = [draft for record in records for draft in self.drafts(record, form)]
        return encode_drafts(drafts, tokenizer, form, name=name, key_offset=key_offset)

    def setup(self, stage: str) -> None:
        """Read, check and encode all rows: once for each tokenizer, such as those of several runs.

        Raises:
            ValueError: the data is missing or damaged, a row lacks a field, or there are fewer rows to train
                than a batch has.
        """
        tokenizer = self._find_tokenizer()
        if self._train is None or tokenizer is not self._encoded_by:
            self._encode_all(tokenizer)
        assert self._train is not None
        if stage == "fit" and self.batch_size > len(self._train):
            raise ValueError(
                f"data.batch_size={self.batch_size}: {self._name} has only {len(self._train)} {self.unit} to "
                f"train. Try --data.batch_size {len(self._train)}."
            )
        rest = len(self._train) % self.batch_size
        if stage == "fit" and rest and self.drop_last and not (self.shuffle or self._draws):
            logger.warning(
                "%s.drop_last=true with shuffle=false: every epoch leaves out the same rows, the last %d of "
                "the %d %s of %s. Try --%s.shuffle true, or a batch_size that divides them.",
                self.typed,
                rest,
                len(self._train),
                self.unit,
                self._name,
                self.typed,
            )

    def _encode_all(self, tokenizer: PreTrainedTokenizerBase) -> None:
        rows = self.read()
        train, held_out = self.encode(rows.train, tokenizer, name=rows.train_name), None
        if rows.held_out:
            held_out = self.encode(rows.held_out, tokenizer, name=rows.held_out_name, key_offset=HELD_OUT)
        self._train, self._held_out, self._name = train, held_out, rows.train_name
        self._collate = Collate(pad_token_id=pad_token_id(tokenizer))
        self._encoded_by = tokenizer

    @property
    def train_rows(self) -> list[Row]:
        """The training rows in the order of the data, without those dropped; there after `setup`."""
        return self._encoded().rows

    @property
    def held_out_rows(self) -> list[Row]:
        """The validation rows; empty where there are none."""
        return [] if self._held_out is None else self._held_out.rows

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what a batch holds; there after `setup`."""
        train = self._encoded()
        return tuple(self._collate([train[0]]))

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each training prompt; empty before `setup`."""
        return [] if self._train is None else [len(prompt) for prompt in self._train.prompts]

    @property
    def response_lengths(self) -> list[int]:
        """Tokens of each training response; empty before `setup`, and where rows are prompts only."""
        return [] if self._train is None else [len(response) for response in self._train.responses or ()]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of all rows, held-out ones too; after `setup`."""
        return max(part.longest(0) for part in self._parts())

    @property
    def batch_rows(self) -> int:
        """Rows of a whole batch: `batch_size`, and twice that for pairs."""
        return self.batch_size * self.format().group

    @property
    def rows_per_prompt(self) -> int:
        """Neighbouring rows with the same prompt: 2 where rows are pairs."""
        return self.format().group

    @property
    def has_responses(self) -> bool:
        """Whether batches hold responses; there after `setup`."""
        return self._encoded().responses is not None

    @property
    def marks_bad(self) -> str:
        """What tells that some responses are bad: `pairs`, `labels`, or nothing; there after `setup`."""
        if self.rows_per_prompt > 1:
            return "pairs"
        return "labels" if {"labels", "step_labels"} & set(self.columns) else ""

    def check_lengths(self, *, positions: int, new_tokens: int, generates: bool) -> None:
        """Refuse rows that the model cannot take; after `setup`.

        Args:
            positions: most tokens of the model.
            new_tokens: most tokens that it may add to a prompt.
            generates: whether it answers the prompts; else rows with responses are as long as they are.
        """
        generates = generates or not self.has_responses
        longest = max(part.longest(new_tokens if generates else None) for part in self._parts())
        if longest <= positions:
            return
        limits = [f.name for f in fields(self) if f.name in ("max_prompt_tokens", "max_response_tokens")]
        lower = [f"{self.typed}.{name}" for name in limits]
        if not generates:
            raise ValueError(
                f"the longest prompt and response have {longest} tokens, and the model has {positions} "
                f"positions. Drop what is longer{': lower ' * bool(lower)}{' or '.join(lower)}."
            )
        prompt = longest - new_tokens
        fewer = f"sampling.max_new_tokens={positions - prompt} or " if positions > prompt else ""
        drops = f" ({lower[0]} drops those that are longer)" if lower else ""
        raise ValueError(
            f"sampling.max_new_tokens={new_tokens}: with the longest prompt, {prompt} tokens, that makes "
            f"{longest}, and the model has {positions} positions. Try {fewer}shorter prompts"
            f"{drops}."
        )

    def check_tokens(self, size: int) -> None:
        """Refuse rows with tokens that the model does not have; after `setup`.

        Args:
            size: tokens that the model has.
        """
        for part in self._parts():
            if (found := part.with_token_from(size)) is None:
                continue
            row, token = found
            raise ValueError(
                f"{self.typed}: the tokenizer makes the token {token} of the row with the prompt "
                f"{str(part.rows[row]['prompt'])[:60]!r}, and the model has the tokens 0 to {size - 1}. Give "
                "the model embeddings for all of its tokenizer's tokens (transformers: "
                "model.resize_token_embeddings(len(tokenizer))), or put its own tokenizer beside it."
            )

    def _parts(self) -> list[EncodedRows]:
        """The encoded training rows, and the held-out ones if there are any."""
        return [self._encoded(), *([] if self._held_out is None else [self._held_out])]

    def train_dataloader(self) -> RowLoader:
        """Return a loader of the training rows that can stop and resume within an epoch.

        With `trainer.overfit_batches` it has the order of the data, so that the first batches are repeated;
        the row ids differ between epochs, and so do the responses that are drawn.
        """
        return RowLoader(
            self._encoded(),
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            sampler=self._sampler(),
            collate=self._collate,
            num_workers=self.num_workers,
        )

    def _sampler(self) -> EpochSampler:
        rows = self._encoded()
        of = {"size": len(rows), "seed": self.effective_seed, "fingerprint": rows.fingerprint}
        if self.trainer is not None and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            return FirstRows(shuffle=False, **of)
        if self._draws:
            return DrawnRows(draw=self.draw, **of)
        return EpochSampler(shuffle=self.shuffle, **of)

    def val_dataloader(self) -> list[DataLoader[list[EncodedRow]]]:
        """Return one loader of the held-out rows, or none; their ids are the same at every validation."""
        return [] if self._held_out is None else [self._in_order(self._held_out)]

    def predict_dataloader(self) -> DataLoader[list[EncodedRow]]:
        """Return a loader of the held-out prompts, or of the training prompts where none are held out."""
        rows = self._encoded() if self._held_out is None else self._held_out
        return self._in_order(rows.first_of_each(self.rows_per_prompt))

    def _in_order(self, rows: EncodedRows) -> DataLoader[list[EncodedRow]]:
        return DataLoader(rows, batch_size=self.batch_size, collate_fn=self._collate)

    def _encoded(self) -> EncodedRows:
        if self._train is None:
            raise RuntimeError(
                f"{type(self).__name__}.setup has not run: a Trainer calls it, or call setup('fit')."
            )
        return self._train

    def _find_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer)
        if self.trainer is None:
            raise ValueError(
                "data.tokenizer is not set, and there is no Trainer to ask. Try --data.tokenizer embedded."
            )
        algorithm = self.trainer.lightning_module
        tokenizer: object = algorithm.tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(
                f"{type(algorithm).__name__}.tokenizer is a {type(tokenizer).__name__}, not a tokenizer."
            )
        return tokenizer
