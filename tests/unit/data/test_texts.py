"""TextData: documents packed into blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from rlhf_lightning.data import TextData
from rlhf_lightning.data.sampler import HELD_OUT
from tests.embedded_model import build_byte_tokenizer
from tests.unit.data.conftest import Writer, batches


def texts(file: Path, **options: object) -> TextData:
    given = {"path": str(file), "tokenizer": "embedded", "batch_size": 2, "shuffle": False, "block_tokens": 4}
    return TextData(**given | options)  # type: ignore[arg-type]


def documents(*contents: object) -> list[dict[str, object]]:
    return [{"text": content} for content in contents]


def test_documents_are_joined_and_cut(write_rows: Writer) -> None:
    data = texts(write_rows(*documents("abc", "de", "fgh")))  # abc. de.f gh.
    first, last = batches(data)
    assert first["prompt_ids"].tolist() == [[97], [100]]
    assert first["response_ids"].tolist() == [[98, 99, 258], [101, 258, 102]]
    assert first["prompt_mask"].all()
    assert first["response_mask"].all(), "no padding"
    assert first["row_ids"].tolist() == [0, 1]
    assert first["rows"] == [{"prompt": "a", "data_source": "train"}, {"prompt": "d", "data_source": "train"}]
    assert last["prompt_ids"].tolist() == [[103]]
    assert last["response_ids"].tolist() == [[104, 258]], "the last block is shorter"
    assert (data.unit, data.batch_rows, data.has_responses) == ("blocks", 2, True)


def test_a_shorter_last_block_is_padded(write_rows: Writer) -> None:
    batch = batches(texts(write_rows(*documents("abc", "d"))))[0]
    assert batch["response_ids"].tolist() == [[98, 99, 258], [258, 256, 256]]
    assert batch["response_mask"].tolist() == [[True] * 3, [True, False, False]]


def test_a_last_block_of_one_token_is_left_out(write_rows: Writer) -> None:
    (batch,) = batches(texts(write_rows(*documents("abcd")), batch_size=1))
    assert batch["response_ids"].tolist() == [[98, 99, 100]]


def test_predictions_are_tokens_minus_blocks(write_rows: Writer) -> None:
    contents = ["x" * n for n in range(1, 30)]
    tokens = sum(map(len, contents)) + len(contents)
    found = batches(texts(write_rows(*documents(*contents)), block_tokens=16, batch_size=7))
    blocks = sum(len(batch["row_ids"]) for batch in found)
    assert blocks == -(-tokens // 16)
    assert sum(int(batch["response_mask"].sum()) for batch in found) == tokens - blocks


def test_held_out_documents(write_rows: Writer) -> None:
    data = texts(write_rows(*documents("abc", "def", "gh")), val_rows=1)
    data.setup("fit")
    (batch,) = data.val_dataloader()[0]
    assert batch["response_ids"].tolist() == [[104, 258]]
    assert batch["row_ids"].tolist() == [HELD_OUT]


def test_tokens_that_the_tokenizer_adds(write_rows: Writer, tmp_path: Path) -> None:
    both = build_byte_tokenizer()
    both.backend_tokenizer.post_processor = TemplateProcessing(
        "<bos> $0 <eos>", special_tokens=[("<bos>", 257), ("<eos>", 258)]
    )
    both.save_pretrained(tmp_path / "tokenizer")
    file = write_rows(*documents("a", "b"))
    (batch,) = batches(texts(file, tokenizer=str(tmp_path / "tokenizer"), block_tokens=6, batch_size=1))
    assert batch["prompt_ids"].tolist() + batch["response_ids"].tolist() == [[257], [97, 258, 257, 98, 258]]


def test_blocks_that_the_model_cannot_take(write_rows: Writer) -> None:
    data = texts(write_rows(*documents("abc", "def")))
    data.setup("fit")
    data.check_lengths(positions=4, new_tokens=999, generates=False)
    with pytest.raises(
        ValueError, match=r"data\.block_tokens=4: the model has 3 positions\. Try --data\.block"
    ):
        data.check_lengths(positions=3, new_tokens=0, generates=False)


def test_answers_to_first_tokens_that_the_model_cannot_take(write_rows: Writer) -> None:
    data = texts(write_rows(*documents("abc", "def")))
    data.setup("predict")
    data.check_lengths(positions=3, new_tokens=2, generates=True)
    with pytest.raises(ValueError, match=r"^sampling\.max_new_tokens=3: .* makes 4, .*_tokens=2\."):
        data.check_lengths(positions=3, new_tokens=3, generates=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (3, r"row 2: the field 'text' holds 3 \(int\); a document is a text"),
        (None, r"row 2: the field 'text' holds None"),
        ("", r"row 2: the text has no tokens\. Remove the row"),
    ],
)
def test_texts_that_are_none(write_rows: Writer, content: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        texts(write_rows(*documents("abc", content))).setup("fit")


def test_options_that_do_not_fit(write_rows: Writer) -> None:
    with pytest.raises(ValueError, match=r"data\.block_tokens=1: .*Try 512"):
        texts(Path("x"), block_tokens=1)
    with pytest.raises(ValueError, match="give one of the two"):
        texts(Path("x"), val_rows=1, val_path="y")
    with pytest.raises(ValueError, match=r"has only 1 blocks to train\. Try --data\.batch_size 1"):
        texts(write_rows(*documents("ab"))).setup("fit")
    with pytest.raises(ValueError, match=r"data\.text_field=text: .*row 1 has no such field; it has: prompt"):
        texts(write_rows({"prompt": "a"})).setup("fit")
