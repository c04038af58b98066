"""A second data module beside the first: pre-training data for the ptx loss.

main   batch 0   batch 1   batch 2  |  batch 0   batch 1   ...      its epochs are those of the run
ptx    batch 0   batch 1   batch 0     batch 1   batch 0   ...      begins anew whenever it ends
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, cast

from lightning.pytorch import LightningDataModule, Trainer

from rlhf_lightning.data.batch import EncodedRow, RowBatch
from rlhf_lightning.data.loader import RowLoader
from rlhf_lightning.data.module import RowData
from rlhf_lightning.data.sampler import EpochSampler
from rlhf_lightning.field_types import check_types
from rlhf_lightning.retold import retold

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class MixedLoader:
    """Batches of a main loader, each with a batch of a second one under the key `ptx`.

    The second begins anew, in a new order, whenever it ends, independently of the epochs of the first.
    """

    def __init__(self, main: RowLoader, ptx: RowLoader) -> None:
        self._main = main
        self._ptx = ptx
        self._ptx_batches: Iterator[RowBatch] | None = None

    @property
    def sampler(self) -> EpochSampler:
        """The order of the first loader, to which a Trainer announces the epochs."""
        sampler: EpochSampler = self._main.sampler
        return sampler

    def __len__(self) -> int:
        return len(self._main)

    def __iter__(self) -> Iterator[RowBatch]:
        for batch in self._main:
            yield {**batch, "ptx": self._next_ptx()}

    def _next_ptx(self) -> RowBatch:
        batch = None if self._ptx_batches is None else next(self._ptx_batches, None)
        while batch is None:  # runs twice after a resume at the end of an epoch of ptx
            self._ptx_batches = iter(self._ptx)
            batch = next(self._ptx_batches, None)
        return batch

    def state_dict(self) -> dict[str, object]:
        """Where the batches that were taken end, in both loaders."""
        return {"main": self._main.state_dict(), "ptx": self._ptx.state_dict()}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Make the next iteration continue where the state was taken; one without `main` begins that anew.

        Raises:
            ValueError: the state is of a run without a second loader, or of other rows or options.
        """
        if "ptx" not in state_dict:
            raise ValueError(
                "data.ptx: the checkpoint was taken in the middle of an epoch without a second data module. "
                "Resume with the same data options."
            )
        self._ptx_batches = None
        states = cast("dict[str, dict[str, object]]", state_dict)
        loaders = {"main": self._main, "ptx": self._ptx}
        for name, loader in loaders.items():
            if name not in states:
                continue
            with retold(partial(_named, name)):
                loader.load_state_dict(states[name])

    def close(self) -> None:
        """End the workers of both."""
        self._ptx_batches = None
        self._main.close()
        self._ptx.close()


@dataclass(kw_only=True, eq=False, repr=False)
class MixedData(LightningDataModule):
    """Training batches of `main`, each with a batch of `ptx` under that key; all else is main's.

    The last batch before `ptx` begins again may have fewer rows, unless its `drop_last` leaves it out.

    On the command line: `--data mixeddata --data.main rlhf_lightning.data.PromptData --data.main.path FILE
    --data.ptx rlhf_lightning.data.TextData --data.ptx.path FILE`.
    """

    main: RowData
    """What the run trains on: it counts the epochs, and is validated and predicted on."""
    ptx: RowData
    """Rows with responses, such as those of TextData or CompletionData; they begin again when they end."""

    def __post_init__(self) -> None:
        super().__init__()
        check_types(self, name="data")
        self.main.typed, self.ptx.typed = "data.main", "data.ptx"
        self._loader: MixedLoader | None = None

    def setup(self, stage: str) -> None:
        """Set both up.

        Raises:
            ValueError: one of them refuses its data, `ptx` has no responses, or the trainer is to overfit
                or to reload.
        """
        if self.trainer is not None and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            raise ValueError(
                "trainer.overfit_batches: a second data module goes round by itself. Try --data.main alone."
            )
        often = 0 if self.trainer is None else self.trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if often:
            raise ValueError(
                f"trainer.reload_dataloaders_every_n_epochs={often}: a second data module would begin anew "
                "each time, and its last rows never be read. Leave it out."
            )
        for name, part in (("main", self.main), ("ptx", self.ptx)):
            part.trainer = self.trainer
            with retold(partial(_renamed, name, part)):
                part.setup(stage)
        if not self.ptx.has_responses:
            raise ValueError(
                f"data.ptx={type(self.ptx).__name__}: its rows have no responses to learn from. "
                "Try --data.ptx rlhf_lightning.data.TextData."
            )

    def teardown(self, stage: str) -> None:
        """End the workers."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def train_dataloader(self) -> MixedLoader:
        """Return a loader of both that can stop and go on in the middle of an epoch."""
        self._loader = MixedLoader(self.main.train_dataloader(), self.ptx.train_dataloader())
        return self._loader

    def val_dataloader(self) -> Sequence[DataLoader[list[EncodedRow]]]:
        """Return the validation loader of `main`."""
        return self.main.val_dataloader()

    def predict_dataloader(self) -> DataLoader[list[EncodedRow]]:
        """Return the loader of `main`."""
        return self.main.predict_dataloader()


def row_data(trainer: Trainer) -> RowData | None:
    """The data module whose epochs are the run's, `main` of MixedData; None if it is none of this project."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    data = data.main if isinstance(data, MixedData) else data
    return data if isinstance(data, RowData) else None


def second_data(trainer: Trainer) -> RowData | None:
    """The data module beside that of `row_data`, `ptx` of MixedData; None where there is one only."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return data.ptx if isinstance(data, MixedData) else None


def _renamed(name: str, part: RowData | type[RowData], said: str) -> str:
    """An error of a part, with its options as they are typed here: data.batch_size as data.ptx.batch_size."""
    options = "|".join(option.name for option in fields(part))
    return re.sub(rf"\bdata\.(?=({options})\b)", f"data.{name}.", said)


def _named(name: str, said: str) -> str:
    """An error of a part's loader, which may name none of the part's options."""
    renamed = _renamed(name, RowData, said)
    return renamed if f"data.{name}." in renamed else f"data.{name}: {renamed}"
