"""Rows that one rank of a generator answers over several calls, and with several versions of the weights.

new rows ----> | begun, the oldest first | waiting, in order | ----> whole groups, as many as rows were new
                    ^ paused once these are whole, and gone on with at the next call

n rows are in hand, P is the width of their prompts, R that of the responses, g the size of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.engines import GenerationEngine
from rlhf_lightning.spec import Sampling

NUMBERS = "row_numbers"
"""A column: where a row stands among all."""
SAID = ("response_ids", "response_mask", "log_probs")
VERSIONS = ("weights_version", "last_version")
COUNTS = ("older_tokens", "num_tokens")
_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class Carry:
    """How rows are answered that may wait for other weights."""

    version: int
    """Of the weights now."""
    max_staleness: int
    """By how many versions the weights may be newer when a row is learned from, one call later, than those
    that drew its first token."""
    rows_together: int = 1
    """Neighbouring rows that are handed over together: the answers to one prompt."""


class InHand:
    """The rows that wait for their answer, or for the rest of it."""

    def __init__(self) -> None:
        self._rows: TensorDict | None = None

    def add(self, rows: TensorDict, *, width: int) -> None:
        """Take rows in hand.

        Args:
            rows: `prompt_ids` [m, P] int64, `prompt_mask` [m, P] bool, `row_ids` and `row_numbers` [m] int64;
                groups have neighbouring numbers.
            width: R, most tokens of a response.
        """
        m = len(rows)
        nothing = torch.zeros(m, width)
        said = {"response_ids": nothing.long(), "response_mask": nothing.bool(), "log_probs": nothing}
        never, none = torch.full((m,), -1), torch.zeros(m, dtype=torch.int64)
        state = {"ended": none.bool(), **dict.fromkeys(VERSIONS, never), **dict.fromkeys(COUNTS, none)}
        new = TensorDict({**rows, **said, **state}, batch_size=[m])
        self._rows = _joined([new.clone()] if self._rows is None else [self._rows, new])

    def answer(
        self, engine: GenerationEngine, *, size: int, carry: Carry, sampling: Sampling, seed: int
    ) -> TensorDict:
        """Go on until as many rows are whole, and those that may not wait any longer; hand them over.

        Args:
            engine: that answers.
            size: rows to hand over, in whole groups.
            carry: how.
            sampling: as for `GenerationEngine.resume`.
            seed: as for `GenerationEngine.resume`.

        Returns:
            size rows in the order of their numbers: what `GenerationEngine.generate` returns, `row_numbers`,
            `weights_version` and `last_version` [size] int64, of the first and of the last token,
            `num_tokens` and, of these not by the last version, `older_tokens` [size] int64.
        """
        assert self._rows is not None
        together = carry.rows_together
        rows, oldest = _ordered(self._rows, together)
        urgent = int((oldest <= carry.version + 1 - carry.max_staleness).sum())

        def enough(ended: Tensor) -> bool:
            whole = ended.view(-1, together).all(1)
            return bool(whole[:urgent].all()) and int(whole.sum()) * together >= size

        said = engine.resume(rows, sampling=sampling, seed=seed, pause=enough, at_once=size)
        rows = _noted(rows, said, carry.version)
        whole = rows["ended"].view(-1, together).all(1).nonzero()[: size // together, 0]
        chosen = torch.zeros(len(rows) // together, dtype=torch.bool)
        chosen[whole] = True
        chosen = chosen.repeat_interleave(together)
        found, self._rows = rows[chosen], rows[~chosen]
        found = found[found[NUMBERS].argsort()]
        return cast(TensorDict, found.select(*SAID, NUMBERS, *VERSIONS, *COUNTS))


def _joined(parts: Sequence[TensorDict]) -> TensorDict:
    """The rows of all parts, whose prompts are widened on the left to the widest."""
    width = max(part["prompt_ids"].shape[1] for part in parts)
    for part in parts:
        for name in ("prompt_ids", "prompt_mask"):
            part[name] = pad(part[name], (width - part[name].shape[1], 0))
    return cast(TensorDict, torch.cat(cast(list[Tensor], list(parts))))


def _ordered(rows: TensorDict, together: int) -> tuple[TensorDict, Tensor]:
    """Groups that are begun, the oldest first, before others; and the version that began each, [n / g]."""
    rows = rows[rows[NUMBERS].argsort()]
    versions = rows["weights_version"]
    oldest = versions.where(versions >= 0, _NEVER).view(-1, together).amin(1)
    order = oldest.argsort(stable=True)
    return rows[(order[:, None] * together + torch.arange(together)).flatten()], oldest[order]


def _noted(rows: TensorDict, said: TensorDict, version: int) -> TensorDict:
    """The rows with what they say now, and which weights said it."""
    before, now = rows["num_tokens"], said["response_mask"].sum(1)
    grew = now > before
    newer = grew & (before > 0) & (rows["last_version"] != version)
    noted = {
        "weights_version": torch.where(grew & (before == 0), version, rows["weights_version"]),
        "last_version": torch.where(grew, version, rows["last_version"]),
        "older_tokens": torch.where(newer, before, rows["older_tokens"]),
        "num_tokens": now,
    }
    return TensorDict({**rows, **said, **noted}, batch_size=rows.batch_size)
