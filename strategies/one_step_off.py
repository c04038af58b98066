"""Every model alone, with a generator one batch ahead: it answers the next while the others learn."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from lightning.pytorch import Trainer

from rlhf_lightning.checkpoint import IN_FLIGHT, Column, columns_of
from rlhf_lightning.controller import Batch, Caller
from rlhf_lightning.data import row_data
from rlhf_lightning.functional import Loss, PolicyLoss, ReinforceLoss
from rlhf_lightning.strategies.openrlhf import OpenRLHF
from rlhf_lightning.workers import Actor, Ahead, GenerationAhead, OtherActor, PartialGeneration

logger = logging.getLogger(__name__)

_STALENESS, _BATCH_SIZE = "max_staleness", "batch_size_in_flight"
"""Keys of a checkpoint under which the options stand that decide how many rows are in flight."""


class OneStepOff(OpenRLHF):
    """As OpenRLHF, but answers are drawn with the weights of one iteration before, or of several.

    The policy loss takes its ratio to the log-probabilities under those older weights. With
    `actor.recompute_log_probs` it takes the ratio to the current weights, and `policy_loss.correction` weighs
    each token for the difference between the two. A run warns of a loss in a field whose `columns` show that
    it takes older answers for new ones: without that correction, or without a ratio. A run that continues
    from a checkpoint answers the prompts that were in flight once more, with the weights of the checkpoint.
    """

    strategy_name = "one-step-off"
    of_generation = ("generator_devices", "max_staleness")

    max_staleness: int = 1
    """Most versions by which the weights behind a token may be older than the generator's. 1: the generator
    finishes whole batches. From 2 on (partial rollouts) a batch is whatever rows finish first, and unfinished
    answers are continued by the next weights."""

    def __post_init__(self) -> None:
        """Refuse a staleness below 1."""
        super().__post_init__()
        if self.max_staleness < 1:
            raise ValueError(
                f"strategy.max_staleness={self.max_staleness}: answers are at least one version behind. "
                "Try 1, or --strategy openrlhf."
            )
        self.generation: Ahead | None = None
        self._restored: Batch | None = None
        self._batch_size: int | None = None

    def setup(self, trainer: Trainer) -> None:
        """See `Strategy.setup`.

        Raises:
            ValueError: the last batch of an epoch is smaller than the others, or partial rollouts have an
                environment or an actor whose class has an `answer` of its own.
        """
        if self.max_staleness > 1:
            self.refuse_whole_answers(instead="--strategy.max_staleness 1")
        self._check_batches(trainer)
        if trainer.state.fn == "fit" and not self.algorithm.reads_only:
            self._warn_of_older_tokens()
        super().setup(trainer)

    def _check_batches(self, trainer: Trainer) -> None:
        data = row_data(trainer)
        self._batch_size = None if data is None else data.batch_size
        generates = not self.algorithm.reads_only
        if trainer.state.fn == "fit" and generates and data is not None:
            whole, rest = divmod(len(data.train_rows), data.batch_rows)
            limit = trainer.limit_train_batches
            reached = limit if isinstance(limit, int) else int((whole + 1) * limit)
            ends = reached > whole and not 0 <= trainer.max_steps <= whole
            if rest and ends and not data.drop_last:
                raise ValueError(
                    f"{data.typed}.batch_size={data.batch_size}: an epoch of {len(data.train_rows)} rows "
                    f"ends with a batch of {rest}, and generation that is a batch ahead needs batches of one "
                    f"size. Try --{data.typed}.drop_last true."
                )

    def _warn_of_older_tokens(self) -> None:
        """Say so where a loss, by its columns, takes tokens of older weights for the actor's own."""
        for name, loss in self.algorithm.loss_fields().items():
            reads = {*loss.columns}
            plain = isinstance(loss, ReinforceLoss) or ("advantages" in reads and "log_probs" not in reads)
            if "rollout_log_probs" in reads or not (plain or "log_probs" in reads):
                continue
            recomputes = self.algorithm.main_actor.recompute_log_probs
            if plain or recomputes:
                logger.warning(
                    "%s=%s has %s, so answers of older weights pass for those of the present ones. %s",
                    name,
                    type(loss).__name__,
                    "no ratio" if plain else "its ratio to the present weights (actor.recompute_log_probs)",
                    _weighted(name, loss, recomputes=recomputes),
                )

    def callers(self, workers: Mapping[str, Caller]) -> Mapping[str, Caller]:
        """As `OpenRLHF.callers`; other actors, which are not ahead, say what they answer."""
        found, ahead = super().callers(workers), self.generation
        if ahead is None:
            return found
        actors = {name for name, role in self.algorithm.roles().items() if isinstance(role, Actor)}
        others = actors & {*workers} - {"actor"}

        def is_stepping() -> bool:
            return self.algorithm._current_fx_name == "training_step"

        return {**found, **{name: OtherActor(name, workers[name], ahead, is_stepping) for name in others}}

    def make_generation(self, actor: Caller, generator: Caller, *, recompute_log_probs: bool) -> Ahead:
        """See `OpenRLHF.make_generation`."""
        ahead: Ahead
        if self.max_staleness > 1:
            ahead = PartialGeneration(
                actor, generator, recompute_log_probs=recompute_log_probs, max_staleness=self.max_staleness
            )
        else:
            ahead = GenerationAhead(actor, generator, recompute_log_probs=recompute_log_probs)
        ahead.in_flight, self._restored = self._restored, None
        ahead.is_validating = lambda: not self.algorithm.trainer.training
        return ahead

    def after_step(self) -> None:
        """See `Strategy.after_step`; the next step may call `generate_sequences` once more."""
        super().after_step()
        if self.generation is not None:
            self.generation.end_step()

    def teardown(self) -> None:
        """See `Strategy.teardown`; prompts of a checkpoint that no run has answered are forgotten."""
        self._restored = None
        super().teardown()

    def metrics(self) -> dict[str, float]:
        """`response/staleness`; with partial rollouts also how much was carried over."""
        return {} if self.generation is None else self.generation.metrics()

    def in_flight(self) -> dict[str, object]:
        """See `Strategy.in_flight`; nothing of prompts with columns that a checkpoint cannot hold."""
        rows = None if self.generation is None else self.generation.in_flight
        options = {_STALENESS: self.max_staleness, _BATCH_SIZE: self._batch_size}
        return {IN_FLIGHT: columns_of(rows, what="prompts in flight"), **options}

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, object]:
        """See `Strategy.load_checkpoint`.

        Raises:
            ValueError: as there, or other options than these decided which rows are in flight.
        """
        state = super().load_checkpoint(checkpoint_path, weights_only)
        if self._restored is not None and not self.algorithm.reads_only:
            self._check_in_flight(checkpoint_path, state, rows=len(self._restored))
        return state

    def _check_in_flight(self, path: str | Path, state: Mapping[str, object], *, rows: int) -> None:
        saved = cast("Mapping[str, object]", state.get("hyper_parameters", {})).get("group_size")
        staleness, group_size = state.get(_STALENESS), self.algorithm.hparams.get("group_size")
        data, batch_size = row_data(self.algorithm.trainer), state.get(_BATCH_SIZE)
        if self.max_staleness == 1 and staleness != 1:
            name, own, there = "strategy.max_staleness", cast(object, self.max_staleness), staleness
        elif None not in (group_size, saved) and group_size != saved:  # without one, the rows will show it
            name, own, there = "algo.group_size", group_size, saved
        elif data is not None and batch_size not in (None, data.batch_size):
            name, own, there = f"{data.typed}.batch_size", data.batch_size, batch_size
        else:
            return
        raise ValueError(
            f"{name}={own}: checkpoint {path} was written with {there}, which decided its {rows} rows in "
            f"flight. Type --{name} {there}."
        )

    def restore_in_flight(self, columns: dict[str, Column]) -> None:
        """See `Strategy.restore_in_flight`; the first call answers them."""
        self._restored = Batch.of(columns) if columns else None


def _weighted(name: str, loss: Loss, *, recomputes: bool) -> str:
    """How a loss weights tokens for the weights that drew them."""
    if isinstance(loss, PolicyLoss):
        both = "" if recomputes else "--algo.actor.recompute_log_probs true "
        return f"Type {both}--algo.{name}.correction.high 2."
    return (
        "Let its columns name rollout_log_probs, those that tokens were drawn with, and weight each token by "
        "the ratio to them."
    )
