"""Re-encodes responses for a judge whose tokenizer is not the actor's.

actor's ids  -->  prompt + response, or messages in the judge's own chat template  -->  the judge's ids
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from jinja2 import TemplateError
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.answers import answer_tokens, turn_end
from rlhf_lightning.data.batch import padded
from rlhf_lightning.data.format import Format
from rlhf_lightning.data.record import are_messages
from rlhf_lightning.data.rendering import templated

ReadsTo: TypeAlias = Literal["template", "end"]
_FORM = Format(chat_template=True)


@dataclass(frozen=True, kw_only=True)
class Retelling:
    """Turns prompts and responses into the tokens of a judge's own tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    """The judge's."""
    positions: int | None = None
    """Most tokens that the judge reads; of longer texts it reads the last ones. None: no limit is known."""
    reads_to: ReadsTo = "template"
    """Where the judge has its score; see `Judge.reads_to`."""

    def rows(
        self, raw: Sequence[Mapping[str, object]], responses: Sequence[str | None], *, ended: Sequence[bool]
    ) -> TensorDict:
        """The conversations as rows whose response is their last token, at which a judge has its score.

        Args:
            raw: the raw rows: `prompt`, and `prompt_messages` where the data has a chat template.
            responses: texts without special tokens, as they stand behind a prompt that is a text; None where
                there is none to judge.
            ended: whether the actor ended a response itself.

        Returns:
            prompt_ids [B, P] int64, prompt_mask [B, P] bool, response_ids [B, 1] int64, response_mask [B, 1]
            bool, False where there is nothing to judge.

        Raises:
            ValueError: the chat template refuses messages, or there is none.
        """
        told = [
            [] if response is None else self._cut(self._ids(row, response, ended=done))
            for row, response, done in zip(raw, responses, ended, strict=True)
        ]
        ids, mask = padded(told, left=True)
        parts = {"prompt_ids": ids[:, :-1], "prompt_mask": mask[:, :-1]}
        last = {"response_ids": ids[:, -1:], "response_mask": mask[:, -1:]}
        return TensorDict(parts | last, batch_size=[len(told)])

    def _rendered(self, messages: list[dict[str, str]], *, answered: bool) -> str:
        try:
            return templated(messages, self.tokenizer, _FORM, answered=answered)
        except (TemplateError, ValueError) as err:
            roles, why = ", ".join(message["role"] for message in messages), str(err).splitlines()[0]
            raise ValueError(
                f"the tokenizer of {self.tokenizer.name_or_path} cannot render messages of {roles} ({why}). "
                "Take a model with a chat template for them, or one with the actor's tokenizer."
            ) from err

    def _ids(self, row: Mapping[str, object], response: str, *, ended: bool) -> list[int]:
        """The tokens of a prompt and a response, at least one."""
        messages = row.get("prompt_messages")
        if are_messages(messages):
            if self.reads_to == "template":
                return self._plain(
                    self._rendered([*messages, {"role": "assistant", "content": response}], answered=True)
                )
            end = [self._end] if ended else []
            (said,) = answer_tokens([[response]], self.tokenizer, _FORM)
            return [*self._plain(self._rendered([*messages], answered=False)), *said, *end]
        eos = self.tokenizer.eos_token_id
        ids = list(self.tokenizer.encode(str(row["prompt"]) + response))
        return [*ids, eos] if ended and isinstance(eos, int) and ids[-1:] != [eos] else ids

    @cached_property
    def _end(self) -> int:
        return turn_end(self.tokenizer, _FORM)

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _cut(self, ids: list[int]) -> list[int]:
        if self.positions is None or len(ids) <= self.positions:
            return ids
        warnings.warn(
            f"{self.tokenizer.name_or_path} reads {self.positions} tokens: the beginnings of longer "
            "conversations are left out",
            stacklevel=2,
        )
        return ids[-self.positions :]
