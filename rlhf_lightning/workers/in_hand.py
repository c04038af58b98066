"""Rows that one rank of a generator answers over several calls, with several versions of the weights.

new rows ----> | begun, oldest first | waiting, in order | ----> finished groups, as many rows as were new
                    ^ paused once these are finished, and continued at the next call

n rows are in hand, P is the width of their prompts, R that of the responses, g the rows of a group.
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
from rlhf_lightning.engines.prompts import begun
from rlhf_lightning.functional.groups import rows_of_groups
from rlhf_lightning.spec import Sampling

NUMBERS = "row_numbers"
"""Column [n] int64: the order of the rows; rows of a group have consecutive numbers."""
SAID = ("response_ids", "response_mask", "log_probs")
"""Columns [n, R] of what a response has so far."""
VERSIONS = ("weights_version", "last_version")
"""Columns [n] int64: versions of the weights that drew a row's first and last token, -1 before the first."""
COUNTS = ("older_tokens", "num_tokens")
"""Columns [n] int64: tokens of a response that are not by `last_version`, and all of its tokens."""
_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class Carry:
    """How far unfinished rows may be carried over to later weights."""

    version: int
    """Version of the current weights."""
    max_staleness: int
    """Most versions by which the weights that learn from a row, one call later, may be newer than those that
    drew its first token."""
    rows_together: int = 1
    """Rows of a group: neighbours, the answers to one prompt, which are returned together."""


class InHand:
    """The rows of one rank whose answers are not finished."""

    def __init__(self) -> None:
        self._rows: TensorDict | None = None

    def add(self, rows: TensorDict, *, width: int) -> None:
        """Add rows.

        Args:
            rows: `prompt_ids` [m, P] int64, `prompt_mask` [m, P] bool, `row_ids` and `row_numbers` [m] int64;
                those of a group are consecutive.
            width: R, most tokens of a response.
        """
        never, none = torch.full((len(rows),), -1), torch.zeros(len(rows), dtype=torch.int64)
        state = {**dict.fromkeys(VERSIONS, never), **dict.fromkeys(COUNTS, none)}
        new = TensorDict({**begun(rows, width=width), **state}, batch_size=rows.batch_size)
        self._rows = _joined([new] if self._rows is None else [self._rows, new])

    def answer(
        self, engine: GenerationEngine, *, size: int, carry: Carry, sampling: Sampling, seed: int
    ) -> TensorDict:
        """Generate until enough rows are finished, and all rows that may not become staler; return them.

        Args:
            engine: what generates.
            size: rows to return, in whole groups.
            carry: current version, and how stale a row may become.
            sampling: as for `GenerationEngine.resume`.
            seed: as for `GenerationEngine.resume`.

        Returns:
            `size` rows in the order of their numbers: what `GenerationEngine.generate` returns, and the
            columns `row_numbers`, `VERSIONS` and `COUNTS`.
        """
        assert self._rows is not None
        together = carry.rows_together
        rows, oldest = _ordered(self._rows, together)
        urgent = int((oldest <= carry.version + 1 - carry.max_staleness).sum())

        def enough(ended: Tensor) -> bool:
            finished = ended.view(-1, together).all(1)
            return bool(finished[:urgent].all()) and int(finished.sum()) * together >= size

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
    """Concatenate the rows; prompts are padded on the left to the widest."""
    width = max(part["prompt_ids"].shape[1] for part in parts)
    for part in parts:
        for name in ("prompt_ids", "prompt_mask"):
            part[name] = pad(part[name], (width - part[name].shape[1], 0))
    return cast(TensorDict, torch.cat(cast(list[Tensor], list(parts))))


def _ordered(rows: TensorDict, together: int) -> tuple[TensorDict, Tensor]:
    """The rows, groups begun by the oldest weights first; and the version that began each group, [n / g]."""
    rows = rows[rows[NUMBERS].argsort()]
    versions = rows["weights_version"]
    oldest = versions.where(versions >= 0, _NEVER).view(-1, together).amin(1)
    order = oldest.argsort(stable=True)
    return rows[rows_of_groups(order, size=together)], oldest[order]


def _noted(rows: TensorDict, said: TensorDict, version: int) -> TensorDict:
    """The rows with their responses so far (`said`), and with `VERSIONS` and `COUNTS` brought up to date."""
    before, now = rows["num_tokens"], said["response_mask"].sum(1)
    grew = now > before
    newer = grew & (rows["last_version"] != version)
    noted = {
        "weights_version": torch.where(grew & (before == 0), version, rows["weights_version"]),
        "last_version": torch.where(grew, version, rows["last_version"]),
        "older_tokens": torch.where(newer, before, rows["older_tokens"]),
        "num_tokens": now,
    }
    return TensorDict({**rows, **said, **noted}, batch_size=rows.batch_size)
