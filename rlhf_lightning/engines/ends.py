"""How responses end in generation: at end tokens, or at stop texts, which are looked for after each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.spec import Sampling

_UNFINISHED = "\ufffd"
"""What a tokenizer decodes some bytes of an incomplete character to."""


class StopTexts:
    """Finds out whether a response has just completed one of the stop texts.

    The tokens of a text may also hold characters before and behind it: ` <`, `/answer` and `>.` for
    `</answer>`. So texts are looked for in what the last tokens decode to. Which tokens can complete a text
    is computed once, for the whole vocabulary; after any other token nothing needs to be decoded.
    """

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._texts, self._tokenizer = tuple(texts), tokenizer
        self._window = max(len(text.encode()) for text in texts) + 4
        """Number of last tokens to decode: a token may be one byte, and 4 complete a character before."""
        lasts = {text[-1] for text in texts}
        any_may = any(last.isspace() for last in lasts)  # decoded alone, a token may lose its spaces
        endings = {*lasts, _UNFINISHED}
        highest = max(tokenizer.get_vocab().values())  # numbers of tokens may have gaps
        found = [any_may or not endings.isdisjoint(self._read([n])) for n in range(highest + 1)]
        self._may_end = torch.tensor([*found, False])

    def _read(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def may_end(self, tokens: Tensor) -> Tensor:
        """Whether each token can complete a text: [n] int64 -> [n] bool."""
        self._may_end = self._may_end.to(tokens.device)
        return self._may_end[tokens.clamp(max=len(self._may_end) - 1)]

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens completes a text."""
        width = self._window
        while width < len(tokens) and self._read(tokens[-width:]).startswith(_UNFINISHED):
            width *= 2  # it began within a character, whose bytes decode only together
        whole, before = self._read(tokens[-width:]), self._read(tokens[-width:-1])
        known = len(before.rstrip(_UNFINISHED))
        return any(text in whole[max(0, known - len(text) + 1) :] for text in self._texts)


_stop_texts = lru_cache(maxsize=8)(StopTexts)
"""Cached: making one decodes the whole vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """How responses end."""

    pad_token_id: int
    """Fills the columns behind a response."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, in addition to `Sampling.stop_token_ids`."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Decodes responses; needed where `Sampling.stop_strings` has texts."""

    def tokens(self, sampling: Sampling) -> list[int]:
        """All tokens that end a response, ascending."""
        return sorted({*self.eos_token_ids, *sampling.stop_token_ids})

    def texts(self, sampling: Sampling) -> StopTexts | None:
        """Finds the texts that end a response; None where there are none."""
        if not sampling.stop_strings:
            return None
        assert self.tokenizer is not None
        return _stop_texts(sampling.stop_strings, self.tokenizer)

    def cut_off(self, ids: Tensor, mask: Tensor, *, sampling: Sampling) -> Tensor:
        """Which responses were cut off at the greatest length, without an end.

        Args:
            ids: [B, R] int64, tokens of responses.
            mask: [B, R] bool, True up to the end of each response.
            sampling: with which they were drawn.

        Returns:
            [B] bool.
        """
        ends = torch.tensor(self.tokens(sampling), device=ids.device)
        cut = mask[:, -1] & ~torch.isin(ids[:, -1], ends)
        if (texts := self.texts(sampling)) is not None:
            for row in cut.nonzero()[:, 0].tolist():
                cut[row] = not texts.ended(ids[row].tolist())
        return cut
