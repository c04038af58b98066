"""How responses end: with tokens, and with texts that are found token by token as they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.spec import Sampling

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


_stop_texts = lru_cache(maxsize=8)(StopTexts)
"""It reads a whole vocabulary: once for the texts of a run."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """How responses end."""

    pad_token_id: int
    """What stands behind a response."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside those of `Sampling`."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Reads what is said where `Sampling` has texts that end it."""

    def tokens(self, sampling: Sampling) -> list[int]:
        """Tokens that end a response, each once."""
        return sorted({*self.eos_token_ids, *sampling.stop_token_ids})

    def texts(self, sampling: Sampling) -> StopTexts | None:
        """What finds the texts that end a response; None where there are none."""
        if not sampling.stop_strings:
            return None
        assert self.tokenizer is not None
        return _stop_texts(sampling.stop_strings, self.tokenizer)

    def cut_off(self, ids: Tensor, mask: Tensor, *, sampling: Sampling) -> Tensor:
        """[B] bool, responses without an end.

        Args:
            ids: [B, R] int64, of responses.
            mask: [B, R] bool, what is said in them.
            sampling: how they were drawn.
        """
        ends = torch.tensor(self.tokens(sampling), device=ids.device)
        cut = mask[:, -1] & ~torch.isin(ids[:, -1], ends)
        if (texts := self.texts(sampling)) is not None:
            for row in cut.nonzero()[:, 0].tolist():
                cut[row] = not texts.ended(ids[row].tolist())
        return cut
