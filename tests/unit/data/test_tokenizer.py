"""The byte-level tokenizer and the files that ship in the package."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_lightning.data import prompt_columns
from rlhf_lightning.data.tokenizer import (
    encode_behind,
    end_tokens,
    load_tokenizer,
    token_texts,
)
from rlhf_lightning.spec import CHECKPOINT, EMBEDDED_DIRECTORY
from tests.embedded_model import write_embedded
from tests.unit.data.conftest import write_spacing


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("embedded")


def test_a_byte_is_its_own_token(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Sort 7é€𝄞\n\t\0 :"
    assert tokenizer.encode(text) == list(text.encode())
    assert len(tokenizer) == 264


def test_any_text_comes_back(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)  # noqa: S311
    planes = [(0x0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    for _ in range(200):
        text = "".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(0, 30)))
        ids = tokenizer.encode(text)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("a , b . 'm  <eos>")) == "a , b . 'm  <eos>"


def test_half_a_character_and_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.decode([97, 195, 98]) == "a\ufffdb"
    assert tokenizer.decode([97, 258, 256], skip_special_tokens=True) == "a"
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert ids == (256, 257, 258)
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize(
    ("named", "expected"), [(None, (258,)), (49, (258, 49)), ([258, 49, 50], (258, 49, 50))]
)
def test_generation_config_names_more_ends(
    named: int | list[int] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_DIRECTORY / name, tmp_path / name)
    if named is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert end_tokens(str(tmp_path)) == expected


@pytest.mark.parametrize("text", ["84", " 84", "\n84\n", "", "8 4"])
def test_a_text_behind_another_begins_without_a_space_of_its_own(
    text: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert encode_behind(text, tokenizer) == [*text.encode()]
    characters = ["\n", "\u2581", "8", "4"]
    words = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(characters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    other = PreTrainedTokenizerFast(tokenizer_object=words)
    assert other.encode("84") == [1, 2, 3]
    assert [characters[token] for token in encode_behind(text, other)] == [*text.replace(" ", "\u2581")]


def test_the_text_of_a_token_has_its_spaces(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Which a separator of steps, such as ". ", may hold; half a character is what it is alone."""
    assert token_texts({32, 97, 258, 195}, tokenizer) == {32: " ", 97: "a", 258: "", 195: "\ufffd"}
    assert token_texts(set(), tokenizer) == {}
    other = load_tokenizer(write_spacing(tmp_path / "spacing", "\na."))
    assert other.decode([1]) == ""
    assert token_texts({0, 1, 2, 3}, other) == {0: "", 1: " ", 2: "\n", 3: "a"}


def test_shipped_files_are_what_the_code_writes(tmp_path: Path) -> None:
    write_embedded(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (EMBEDDED_DIRECTORY / name).read_text() == (tmp_path / name).read_text(), name


def test_plain_transformers_reads_them(tokenizer: PreTrainedTokenizerBase) -> None:
    plain = AutoTokenizer.from_pretrained(EMBEDDED_DIRECTORY)
    assert plain.encode("abc") == [97, 98, 99]
    assert plain.chat_template == tokenizer.chat_template
    config = AutoConfig.from_pretrained(EMBEDDED_DIRECTORY)
    assert isinstance(config, LlamaConfig)
    assert (config.vocab_size, config.head_dim, config.eos_token_id) == (264, 32, 258)


def test_texts_become_prompts() -> None:
    tokenizer = load_tokenizer("embedded")
    found = prompt_columns(["abc", "d"], tokenizer)
    assert found["prompt_ids"].tolist() == [[97, 98, 99], [tokenizer.pad_token_id] * 2 + [100]]
    assert found["prompt_mask"].tolist() == [[True] * 3, [False, False, True]]
    with pytest.raises(ValueError, match="1 of 2 texts, such as '', have no tokens"):
        prompt_columns(["a", ""], tokenizer)


def test_what_has_no_tokenizer_is_said_in_whole_sentences(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"\(Couldn't instantiate the backend tokenizer\)\. Give a directory"
    ):
        load_tokenizer(str(tmp_path))
    (tmp_path / CHECKPOINT).touch()
    (tmp_path / "actor").mkdir()
    given = re.escape(str(tmp_path))
    with pytest.raises(ValueError, match=rf"'{given}': no tokenizer is there\. It is a checkpoint: .* OUT`"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=rf"It lies in a checkpoint: .*`rlhf export {given} OUT actor`\."):
        load_tokenizer(str(tmp_path / "actor"))
