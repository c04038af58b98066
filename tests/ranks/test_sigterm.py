"""SIGTERM ends a run in this process at once, in each command; Lightning's handler only notes it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from rlhf_lightning.algorithm import Columns
from rlhf_lightning.algos import GRPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.strategies import Local
from tests.unit.algos.short import grpo, trainer


class Asked(Callback):
    """Asks the run to end as its first batch begins, and keeps what happens after that."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def _ask(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        self.told.append("the batch goes on")

    def on_train_batch_start(self, *_: object, **__: object) -> None:
        self._ask()

    def on_validation_batch_start(self, *_: object, **__: object) -> None:
        self._ask()

    def on_test_batch_start(self, *_: object, **__: object) -> None:
        """Ask."""
        self._ask()

    def on_predict_batch_start(self, *_: object, **__: object) -> None:
        self._ask()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.told.append(type(exception).__name__)


class Examined(GRPO):
    """Has a test of its own."""

    def test_step(self, batch: Columns, batch_idx: int) -> None:
        """Answer nothing."""


@pytest.mark.parametrize(
    ("command", "held_out"), [("fit", 0), ("fit", 2), ("validate", 2), ("test", 0), ("predict", 0)]
)
def test_it_ends_at_once(command: str, held_out: int, tmp_path: Path) -> None:
    """With held-out prompts a fit validates before it trains."""
    before, asked = signal.getsignal(signal.SIGTERM), Asked()
    run = trainer(Local(), tmp_path, callbacks=[asked], limit_val_batches=1 if held_out else 0)
    given: dict[str, object] = {"datamodule": TaskData(batch_size=2, num_rows=2, num_val_rows=held_out)}
    if command == "test":  # for which no data module has rows
        given = {"dataloaders": DataLoader(["Sort 21: "])}  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as end:
        getattr(run, command)(grpo(Examined), **given)
    assert end.value.code == 128 + signal.SIGTERM
    assert asked.told == ["SystemExit"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_is_taken_once_and_only_where_there_is_one() -> None:
    """A fit validates often, also in a thread, where no handler can be set; what is ignored stays so."""
    before, begin = signal.getsignal(signal.SIGTERM), Local().on_validation_start
    told: list[int] = []
    try:
        signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
        with ThreadPoolExecutor(1) as thread:
            thread.submit(begin).result()
        signal.raise_signal(signal.SIGTERM)
        begin()
        taken = signal.getsignal(signal.SIGTERM)
        begin()
        assert signal.getsignal(signal.SIGTERM) is taken
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        assert told == [signal.SIGTERM] * 2
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        begin()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
