"""Files of rows that the tests of the data read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice, pairwise, repeat
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlhf_lightning.data import MixedData, PromptData, RowBatch, RowData
from tests.embedded_model import build_byte_tokenizer

Writer = Callable[..., Path]


def write_spacing(directory: Path, characters: str, *, template: str | None = None) -> str:
    """A tokenizer that puts a space before a text alone, as Llama 2's; tokens are <eos> and characters."""
    vocab = {character: number for number, character in enumerate(["<eos>", "\u2581", *characters])}
    words = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    words.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")  # noqa: S106
    made.chat_template = template
    made.save_pretrained(directory)
    return str(directory)


def write_template(directory: Path, template: str | None) -> str:
    """The embedded tokenizer with a chat template."""
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return str(directory)


def prompt_data(file: Path, **options: object) -> PromptData:
    """Prompts of a file, two in a batch, that are ready to train on."""
    data = PromptData(**{"path": str(file), "tokenizer": "embedded", "batch_size": 2} | options)  # type: ignore[arg-type]
    data.setup("fit")
    return data


def batches(data: RowData | MixedData) -> list[RowBatch]:
    """Set up and return the training batches of one epoch."""
    data.setup("fit")
    return list(data.train_dataloader())


def assert_resumes(make: Callable[[], RowData | MixedData], *, stops: range) -> None:
    """Stop after some batches, and expect those that a run without a stop has: over three epochs."""

    def started(state: str | None = None) -> tuple[Iterator[RowBatch], Callable[[], str]]:
        data = make()
        data.setup("fit")
        loader = data.train_dataloader()
        if state is not None:
            loader.load_state_dict(json.loads(state))
        return chain.from_iterable(repeat(loader)), lambda: json.dumps(loader.state_dict())

    def told(batch: RowBatch) -> list[object]:
        ids = {name: value.tolist() for name, value in batch.items() if isinstance(value, Tensor)}
        return [ids, told(batch["ptx"]) if "ptx" in batch else None]

    expected = [told(batch) for batch in islice(started()[0], stops.stop + 4)]
    assert all(a != b for a, b in pairwise(expected)), "batches differ, so that a wrong one is seen"
    for stop in stops:
        stream, state = started()
        assert [told(batch) for batch in islice(stream, stop)] == expected[:stop]
        resumed, _ = started(state())
        rest = [told(batch) for batch in islice(resumed, stops.stop + 4 - stop)]
        assert rest == expected[stop:], f"after {stop} batches"
