"""Tokenizers: any Hugging Face directory or hub name, and the byte-level one that ships in the package."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from rlhf_lightning.spec import EMBEDDED, EMBEDDED_DIRECTORY, export_first

_ALIKE = 0.99
"""Share of a tokenizer's tokens that must have the same ids in another one whose model reads its ids."""
_CHUNK = 1024
MARK = "\n"
"""A text that is always a token of its own, whatever follows it."""


@lru_cache(maxsize=8)
def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        path: a Hugging Face directory, a hub name, or `embedded`.

    Raises:
        ValueError: there is no tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(_source(path))
    except (OSError, ValueError) as err:
        if instead := export_first(path):
            raise ValueError(f"tokenizer {path!r}: no tokenizer is there. {instead}") from err
        named = path.count("/") < 2 and not path.startswith(("/", ".", "~"))  # as the hub names models
        said = str(err).splitlines()[0].partition(" from one of:")[0]  # of a list, on the lines below
        reason = said if named or Path(path).is_dir() else "no such directory"
        raise ValueError(
            f"tokenizer {path!r}: no tokenizer could be loaded from there ({reason}). Give a "
            f"directory that holds tokenizer.json, a hub name, or {EMBEDDED!r}."
        ) from err
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"tokenizer {path!r}: a {type(tokenizer).__name__} is not a text tokenizer.")
    return tokenizer


@lru_cache(maxsize=8)
def numbered_alike(mine: str, theirs: str) -> tuple[int, int]:
    """How many tokens of one tokenizer have the same id in another, and how many it has."""
    own, other = load_tokenizer(mine).get_vocab(), load_tokenizer(theirs).get_vocab()
    return sum(other.get(token) == number for token, number in own.items()), len(own)


def reads(mine: str, theirs: str, *, my_vocab: int | None, their_vocab: int | None) -> bool:
    """Whether a model with the second tokenizer can read ids of the first; added tokens may differ.

    `my_vocab` and `their_vocab` are the tokens that their models have; None if unknown.
    """
    alike, total = numbered_alike(mine, theirs)
    known = their_vocab is None or highest_token(mine, vocab=my_vocab) < their_vocab
    return alike >= _ALIKE * total and known


@lru_cache(maxsize=8)
def highest_token(path: str, *, vocab: int | None) -> int:
    """The largest id of a tokenizer that a model with a vocabulary of `vocab` tokens can generate.

    A tokenizer may have more tokens than the model: Gemma 3's smallest model has none for images.
    """
    highest = max(load_tokenizer(path).get_vocab().values())
    return highest if vocab is None else min(highest, vocab - 1)


@lru_cache(maxsize=8)
def end_tokens(path: str) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's end token, then others of generation_config.json."""
    try:
        named = GenerationConfig.from_pretrained(_source(path)).eos_token_id
    except OSError:  # there is no such file
        named = None
    found = [load_tokenizer(path).eos_token_id, *(named if isinstance(named, list) else [named])]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def tokenize(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, special: bool
) -> Iterator[array[int]]:
    """Yield the token ids of every text.

    Args:
        texts: any number.
        tokenizer: of the model.
        special: with the tokens that the tokenizer puts around a text, such as a begin token; a text that
            has its begin token already is given no second one.

    Raises:
        ValueError: a text holds half a character, which JSON and Python allow, and no tokenizer.
    """
    doubled = array("i", [tokenizer.bos_token_id] * 2) if tokenizer.bos_token_id is not None else None
    for start in range(0, len(texts), _CHUNK):
        chunk = list(texts[start : start + _CHUNK])
        for text in chunk:
            _check_whole(text)
        for ids in tokenizer(chunk, add_special_tokens=special, verbose=False)["input_ids"]:
            found = array("i", ids)
            yield found[1:] if special and found[:2] == doubled else found


def _check_whole(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as err:
        around = text[max(err.start - 20, 0) : err.end + 20]
        raise ValueError(
            f"a text holds half a character ({text[err.start]!a}) without its other half, in {around!a}. "
            "Correct or remove its row."
        ) from err


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a response or a document.

    Raises:
        ValueError: the tokenizer has none.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end token (eos), which ends a response. Name "
            'one of its tokens in its tokenizer_config.json, such as "eos_token": "<|endoftext|>".'
        )
    return end


def encode_behind(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a text that follows another one; alone, Llama 2's tokenizer would put a space before it."""
    alone, mark, both = (
        tokenizer.encode(part, add_special_tokens=False) for part in (text, MARK, MARK + text)
    )
    return list(both[len(mark) :] if both[: len(mark)] == mark else alone)


def adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text alone is given a space before it that it has not behind another one, as in Llama 2."""
    return encode_behind("a", tokenizer) != list(tokenizer.encode("a", add_special_tokens=False))


def token_texts(ids: Collection[int], tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The text of each token behind others, empty for a special one; alone, Llama 2's lose their space."""
    mark = tokenizer.encode(MARK, add_special_tokens=False)
    before, *both = decoded([mark, *([*mark, i] for i in ids)], tokenizer, skip_special_tokens=True)
    alone = decoded([[i] for i in ids], tokenizer, skip_special_tokens=True)
    return {
        i: text.removeprefix(before) if text.startswith(before) else own
        for i, text, own in zip(ids, both, alone, strict=True)
    }


def decoded(
    ids: list[list[int]], tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False
) -> list[str]:
    """The texts of token ids, one for each; of no ids at all `batch_decode` would make one empty text."""
    return tokenizer.batch_decode(ids, skip_special_tokens=skip_special_tokens) if ids else []


def _source(path: str) -> str:
    return str(EMBEDDED_DIRECTORY) if path == EMBEDDED else path
