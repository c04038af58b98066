"""Which token completes a text, beside decoding everything after each."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.engines.ends import Ends, StopTexts
from rlhf_lightning.spec import Sampling

TEXTS = ("</answer>", "\n\n", "été", "🙂", "END ", ">.<")
CORPUS = ["<answer> l'été 🙂 </answer>\n", "x</answer>.\n\nEND of", "END  été>.< é🙃 THE END"] * 3


def bytes_of_text() -> PreTrainedTokenizerBase:
    return load_tokenizer("embedded")


def merged() -> PreTrainedTokenizerBase:
    """Tokens of several bytes, some of parts of characters."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)


def spaced() -> PreTrainedTokenizerBase:
    """As Llama 2's: a space is part of the word behind it, and the first one is not read."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"]))
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)


def fallback() -> PreTrainedTokenizerBase:
    """As Llama 2's: what has no token of its own is said byte by byte, and these are read all or none."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefxEND<>./"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))  # noqa: S106
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)


def test_bytes_of_characters_before_a_text_do_not_hide_it() -> None:
    tokenizer = fallback()
    for text, said in {"\n": "日本\n", "🙂": "日本語の🙂", "。": "そうです。"}.items():
        stops, tokens = StopTexts((text,), tokenizer), tokenizer.encode(said, add_special_tokens=False)
        assert stops.ended(tokens)
        assert not any(stops.ended(tokens[:n]) for n in range(len(tokens)))


def test_a_token_behind_numbers_that_none_has() -> None:
    inner = Tokenizer(models.WordLevel(vocab={"u": 0, "a": 1, "</a>": 9}, unk_token="u"))  # noqa: S106
    stops = StopTexts(("</a>",), PreTrainedTokenizerFast(tokenizer_object=inner))
    assert stops.may_end(torch.arange(12)).tolist() == [number == 9 for number in range(12)]


@pytest.mark.parametrize("kind", [bytes_of_text, merged, spaced, fallback])
@pytest.mark.parametrize("texts", [TEXTS, *((text,) for text in TEXTS)], ids=str)
def test_it_is_the_first_token_after_which_the_whole_holds_one(
    kind: Callable[[], PreTrainedTokenizerBase], texts: tuple[str, ...]
) -> None:
    """What stands before the window is not looked at, and text before a response's own is not either."""
    tokenizer, random = kind(), Random(0)  # noqa: S311 - draws texts, not keys
    stops = StopTexts(texts, tokenizer)
    pieces = [*CORPUS, *TEXTS, "a", " ", "E", "<", "é", "\n"]
    ended = 0
    for _ in range(80):
        said = "".join(random.choice(pieces) for _ in range(random.randint(1, 4)))
        cut = random.randint(0, 3)  # with a token or two that no text has
        tokens = tokenizer.encode(said, add_special_tokens=False)
        tokens = [*tokens[:cut], *(random.randrange(len(tokenizer)) for _ in range(2)), *tokens[cut:]]
        whole = [tokenizer.decode(tokens[: n + 1]) for n in range(len(tokens))]
        expected = next((n for n, read in enumerate(whole) if any(text in read for text in texts)), None)
        may = stops.may_end(torch.tensor(tokens)).tolist()
        found = [n for n in range(len(tokens)) if stops.ended(tokens[: n + 1])]
        assert next(iter(found), None) == expected, whole[-1]
        assert expected is None or may[expected]
        ended += expected is not None
    assert 5 < ended < 80


def test_a_text_that_was_completed_before_does_not_end_it_again() -> None:
    stops, tokens = StopTexts(("ab",), bytes_of_text()), [*b"xab and more"]
    assert [n for n in range(len(tokens)) if stops.ended(tokens[: n + 1])] == [2]
    assert not StopTexts(("ab",), bytes_of_text()).ended([])


def test_few_tokens_have_to_be_read() -> None:
    stops = StopTexts(("</a>",), bytes_of_text())
    which = stops.may_end(torch.arange(400)).nonzero()[:, 0].tolist()  # a model may have more tokens
    assert ord(">") in which
    assert not {*range(128)} - {ord(">")} & {*which}
    assert StopTexts((" ",), bytes_of_text()).may_end(torch.arange(200)).all()


def test_nothing_is_looked_for_where_nothing_is_asked() -> None:
    assert Ends(pad_token_id=0).texts(Sampling()) is None
    ends, sampling = Ends(pad_token_id=0, tokenizer=bytes_of_text()), Sampling(stop_strings=("a",))
    assert ends.texts(sampling) is ends.texts(sampling)
