"""Checks of the data: whether the algorithm can learn from its columns."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlhf_lightning.data import RowData, TaskData, row_data, second_data
from rlhf_lightning.functional import PairwiseLoss, SFTLoss
from rlhf_lightning.running import KLPenalty
from rlhf_lightning.stepping import is_own

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from rlhf_lightning.algorithm import RLHFAlgorithm

logger = logging.getLogger(__name__)

NO_PTX = (
    "ptx_loss.coef is above 0, and the data has no second batch of text for it. "
    "Try --data mixeddata, with `main` and `ptx`."
)


def check_columns(algorithm: RLHFAlgorithm) -> None:
    """Refuse data without the columns, or without the pairs, that the algorithm learns from.

    Warns of a second data module and of margins that nothing is learned from.

    Raises:
        ValueError: the data lacks a column, margins, pairs or text, holds nothing out for a validation, has
            more rows in a batch than the horizon of a KL penalty allows, or fewer than an optimizer step is
            to take.
    """
    data, name = row_data(algorithm.trainer), type(algorithm).__name__
    if data is None:
        return
    if algorithm.trainer.state.fn == "validate":
        check_held_out(data, what="validate")
        if algorithm.trainer.limit_val_batches == 0:
            raise ValueError(
                "validate: trainer.limit_val_batches=0 leaves nothing to validate. Leave it out, or type 1.0 "
                "for all held-out rows."
            )
    if algorithm.needs_pairs and data.batch_rows != 2 * data.batch_size:
        own = " Where its step draws the other half of each pair, write `draws = True` in the class."
        raise ValueError(
            f"{name} learns from pairs, and {type(data).__name__} gives single rows. "
            f"Try --data preferencedata, with the fields that it needs.{own * is_own(type(algorithm).step)}"
        )
    missing = set(algorithm.needs) - set(data.columns)
    if missing:
        raise ValueError(
            f"{name} learns from the columns {', '.join(algorithm.needs)}, and "
            f"{type(data).__name__} gives no {', '.join(sorted(missing))}. {_giving(missing, data)}"
        )
    if algorithm.trainer.state.fn == "fit":
        _check_ptx(algorithm)
    if not is_own(type(algorithm).step):
        _check_margins(algorithm, data)
        if algorithm.trainer.state.fn == "fit":
            _check_penalties(algorithm, rows=data.batch_rows)
            _check_steps(algorithm, data)


def _giving(missing: set[str], data: RowData) -> str:
    """What to type for the columns that the data does not give."""
    if missing == {"safe"}:
        return f"Type --{data.typed}.safe_fields '[A, B]'."
    others = "completiondata, preferencedata, unpaireddata or stepdata, with the fields that they need"
    if isinstance(data, TaskData) and missing == {"response_ids"}:
        return f"Type --{data.typed}.completions true, or try other data: --data {others}."
    return f"Try other data: --data {others}."


def check_imitable(algorithm: RLHFAlgorithm, stage: str) -> None:
    """Refuse data some of whose answers are bad, for an algorithm that imitates all."""
    data = row_data(algorithm.trainer)
    if data is not None and stage != "predict" and data.marks_bad:
        raise ValueError(
            f"{type(algorithm).__name__} imitates every answer, and {type(data).__name__} gives "
            f"{data.marks_bad}: the bad ones too. Try --data completiondata, with --data.response_field "
            "chosen where rows have pairs."
        )


def _check_margins(algorithm: RLHFAlgorithm, data: RowData) -> None:
    """Refuse a loss that reads margins where the data has none, and warn of margins that no loss reads."""
    losses = algorithm.loss_fields()
    reading = [name for name, loss in losses.items() if "margins" in loss.columns]
    able = [name for name, loss in losses.items() if isinstance(loss, PairwiseLoss)]
    given = "margins" in data.columns
    if reading and not given:
        without = f", or --algo.{reading[0]}.margin false" if reading[0] in able else ""
        raise ValueError(
            f"{reading[0]}: reads the margins, by how much each chosen answer is better, and "
            f"{type(data).__name__} gives none. Type --{data.typed}.margin_field FIELD{without}."
        )
    if given and not reading:
        kind = type(algorithm).__name__
        advice = f"Type --algo.{able[0]}.margin true" if able else "Leave it out"
        logger.warning("%s.margin_field: %s does not read the margins. %s.", data.typed, kind, advice)


def _check_penalties(algorithm: RLHFAlgorithm, *, rows: int) -> None:
    """Refuse a KL weight that steers to a target and could turn negative after one batch of these rows."""
    for value in vars(algorithm).values():
        if isinstance(value, KLPenalty) and value.target is not None:
            value.adapted(value.coef, current=value.target, num_rows=rows)


def _check_steps(algorithm: RLHFAlgorithm, data: RowData) -> None:
    """Refuse optimizer steps of more given answers than an iteration reads: they would be of all those.

    Not with the embedded task: its configuration has a `mini_batch_size` that nobody has typed.
    """
    size = vars(algorithm).get("mini_batch_size", 0)
    whole, unit = (data.batch_size, "pairs") if algorithm.needs_pairs else (data.batch_rows, "rows")
    if algorithm.reads_only and size > whole and not isinstance(data, TaskData):
        raise ValueError(
            f"mini_batch_size={size}: an iteration reads {whole} {unit}, {data.typed}.batch_size, and no "
            f"step takes more. Type --{data.typed}.batch_size {size}, or --algo.mini_batch_size 0 for steps "
            f"of {whole}."
        )


def _check_ptx(algorithm: RLHFAlgorithm) -> None:
    """Refuse, for a pre-training loss, data without a second batch, or with bad answers in it.

    Warns of a second batch from which nothing is learned.
    """
    loss, name = vars(algorithm).get("ptx_loss"), type(algorithm).__name__
    reads, ptx = isinstance(loss, SFTLoss) and loss.coef, second_data(algorithm.trainer)
    if reads and ptx is None:
        raise ValueError(NO_PTX)
    if reads and ptx is not None and ptx.marks_bad:
        raise ValueError(
            f"ptx_loss imitates every answer, and data.ptx, {type(ptx).__name__}, gives "
            f"{ptx.marks_bad}: the bad ones too. Try --data.ptx rlhf_lightning.data.CompletionData, "
            "with --data.ptx.response_field chosen where rows have pairs."
        )
    if ptx is not None and not reads and not is_own(type(algorithm).step):
        advice = "Type --algo.ptx_loss.coef 0.1" if loss else "Type the class of data.main as --data"
        logger.warning("data.ptx: %s does not learn from these rows. %s.", name, advice)


def check_held_out(data: RowData, *, what: str) -> None:
    """Refuse to validate without held-out rows."""
    if not data.held_out_rows:
        raise ValueError(
            f"{what}: {type(data).__name__} holds no rows out to be answered or scored. Try "
            f"{data.typed}.val_rows, {data.typed}.num_val_rows or {data.typed}.val_path, whichever it has."
        )


def check_validates(trainer: Trainer, stage: str, *, name: str) -> None:
    """Refuse, for a callback that needs a validation, a fit without one, and a validation on nothing."""
    if stage == "fit" and not trainer.limit_val_batches:
        raise ValueError(
            f"{name}: with trainer.limit_val_batches=0 nothing is ever validated. "
            "Try --trainer.limit_val_batches 1.0."
        )
    data = row_data(trainer)
    if stage == "fit" and data is None and not trainer.enable_validation:
        raise ValueError(
            f"{name}: there are no held-out rows, so nothing is ever validated. Type "
            "trainer.fit(..., val_dataloaders=...), or give the data module a val_dataloader."
        )
    if stage in ("fit", "validate") and data is not None:
        check_held_out(data, what=name)
