"""Texts that end a response, found token by token as it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"
"""What a tokenizer decodes a part of a character to."""


class StopTexts:
    """Says which tokens complete one of the texts.

    A text may be any number of tokens, which also hold what stands before and behind it: ` <`, `/answer` and
    `>.` for `</answer>`. So it is looked for in what the last tokens read as. Whether a token may end a text
    is known beforehand; where a row's last one may not, nothing is decoded.

    Args:
        texts: none of them empty.
        tokenizer: of the model.
    """

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._texts, self._tokenizer = tuple(texts), tokenizer
        self._window = max(len(text.encode()) for text in texts) + 4
        """Tokens to look at: of a byte each, behind those of a character that begins before them."""
        lasts = {text[-1] for text in texts}
        any_may = any(last.isspace() for last in lasts)  # a token alone may read as none
        endings = {*lasts, _UNFINISHED}
        highest = max(tokenizer.get_vocab().values())  # there may be numbers that no token has
        found = [any_may or not endings.isdisjoint(self._read([n])) for n in range(highest + 1)]
        self._may_end = torch.tensor([*found, False])

    def _read(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def may_end(self, tokens: Tensor) -> Tensor:
        """[n] bool, whether a text may end with each of the tokens [n] int64."""
        self._may_end = self._may_end.to(tokens.device)
        return self._may_end[tokens.clamp(max=len(self._may_end) - 1)]

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the tokens, whatever they are before, completes a text."""
        width = self._window
        while width < len(tokens) and self._read(tokens[-width:]).startswith(_UNFINISHED):
            width *= 2  # bytes of rare characters are read all or none
        whole, before = self._read(tokens[-width:]), self._read(tokens[-width:-1])
        known = len(before.rstrip(_UNFINISHED))
        return any(text in whole[max(0, known - len(text) + 1) :] for text in self._texts)


@lru_cache(maxsize=8)
def stop_texts(texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase | None) -> StopTexts | None:
    """What finds the texts; None where there are none.

    Args:
        texts: `Sampling.stop_strings`.
        tokenizer: of the model; None where no texts are looked for.
    """
    if not texts:
        return None
    assert tokenizer is not None
    return StopTexts(texts, tokenizer)
