"""Experience in portions: while one model works on the second, the next works on the first.

whole      generator [ 0 1 2 3 ]                  in portions   generator [0][1][2][3]
           critic               [ 0 1 2 3 ]                     critic       [0][1][2][3]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from rlhf_lightning.controller.batch import Batch
from rlhf_lightning.controller.register import Caller, Method
from rlhf_lightning.controller.transfer import DataParallel, MicroDataParallel


@dataclass(frozen=True)
class InPortions:
    """Calls of a role, split where it answers row by row: the same answers, the first of them sooner."""

    caller: Caller
    """What runs a call."""
    portions: int
    """Parts of a batch, each a call of its own."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """See `Caller.call`."""
        if batch is None or not len(batch) or not _by_row(method):
            return self.caller.call(method, batch, arguments)
        parts = [part for part in batch.split(self.portions) if len(part)]
        return Batch.joined([cast(Batch, self.caller.call(method, part, arguments)) for part in parts])


def _by_row(method: Method) -> bool:
    """Whether it divides rows over the ranks, and always returns the same columns of them."""
    return bool(method.returns) and isinstance(method.transfer, DataParallel | MicroDataParallel)
