"""Every model alone, a generator that is one batch ahead: it answers while the others learn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from lightning.pytorch import Trainer

from rlhf_lightning.checkpoint import IN_FLIGHT, Column, columns_of
from rlhf_lightning.controller import Batch, Caller
from rlhf_lightning.data import row_data
from rlhf_lightning.strategies.openrlhf import OpenRLHF, refuse_environment, refuse_offload
from rlhf_lightning.workers import GenerationAhead, PartialGeneration

_STALENESS = "max_staleness"
"""Key of a checkpoint under which the option stands that decides how many rows are in flight."""


class OneStepOff(OpenRLHF):
    """As OpenRLHF, but answers are drawn with the weights of one iteration before, or of some.

    The policy loss compares with the log-probabilities of those weights; with `actor.recompute_log_probs` and
    `policy_loss.correction` it compares with the present ones, and weighs each token for what the two differ.
    An iteration that continues from a checkpoint answers what was in flight anew, by the weights that it has.
    """

    strategy_name = "one-step-off"

    max_staleness: int = 1
    """By how many versions the weights behind a token may be older than the generator's. 1: all rows of a
    batch are waited for. From 2 on a batch is what ends first, and answers that are not whole when the
    weights change are gone on with by the new ones."""

    def __post_init__(self) -> None:
        """Refuse answers by the present weights, and offloading.

        Raises:
            ValueError: as said.
        """
        super().__post_init__()
        refuse_offload(self)
        if self.max_staleness < 1:
            raise ValueError(
                f"strategy.max_staleness={self.max_staleness}: answers are at least one version behind. "
                "Try 1, or --strategy openrlhf."
            )
        self.separated: GenerationAhead | PartialGeneration | None = None
        self._restored: Batch | None = None

    def setup(self, trainer: Trainer) -> None:
        """See `Strategy.setup`.

        Raises:
            ValueError: the last batch of an epoch is smaller than the others, or answers that may wait have
                several turns.
        """
        if self.max_staleness > 1:
            refuse_environment(self, instead="--strategy.max_staleness 1")
        self._check_batches(trainer)
        super().setup(trainer)

    def _check_batches(self, trainer: Trainer) -> None:
        data = row_data(trainer)
        generates = "response_ids" not in self.algorithm.needs
        if trainer.state.fn == "fit" and generates and data is not None:
            whole, rest = divmod(len(data.train_rows), data.batch_rows)
            limit = trainer.limit_train_batches
            reached = limit if isinstance(limit, int) else int((whole + 1) * limit)
            ends = reached > whole and not 0 <= trainer.max_steps <= whole
            if rest and ends and not data.drop_last:
                raise ValueError(
                    f"data.batch_size={data.batch_size}: an epoch of {len(data.train_rows)} rows ends with a "
                    f"batch of {rest}, and generation that is a batch ahead needs batches of one size. Try "
                    "--data.drop_last true."
                )

    def separate(
        self, actor: Caller, generator: Caller, *, recompute_log_probs: bool
    ) -> GenerationAhead | PartialGeneration:
        """What the actor's handle calls."""
        ahead: GenerationAhead | PartialGeneration
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
        """See `Strategy.after_step`.

        Raises:
            ValueError: the step has asked for answers several times.
        """
        super().after_step()
        if self.separated is None:
            return
        calls, self.separated.calls = self.separated.calls, 0
        if calls > 1:
            raise ValueError(
                f"{type(self.algorithm).__name__}.step calls generate_sequences {calls} times, and generation"
                " that is a batch ahead answers each call with the rows of the one before. Try --strategy "
                "openrlhf, which answers at once."
            )

    def metrics(self) -> dict[str, float]:
        """`response/staleness`, and with partial rollouts how much was gone on with."""
        return {} if self.separated is None else self.separated.metrics()

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: str | Path, storage_options: object = None
    ) -> None:
        """See `Strategy.save_checkpoint`; the prompts in flight too, unless they hold what it cannot."""
        rows = None if self.separated is None else self.separated.in_flight
        mine = {IN_FLIGHT: columns_of(rows, what="prompts in flight"), _STALENESS: self.max_staleness}
        super().save_checkpoint({**checkpoint, **mine}, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, object]:
        """See `Strategy.load_checkpoint`.

        Raises:
            ValueError: as there, or the prompts in flight are not those of a batch with these options.
        """
        state = super().load_checkpoint(checkpoint_path, weights_only)
        if self._restored is not None:
            self._check_restored(checkpoint_path, state, rows=len(self._restored))
        return state

    def _check_restored(self, path: str | Path, state: Mapping[str, object], *, rows: int) -> None:
        held = cast("Mapping[str, object]", state.get("hyper_parameters", {}))
        staleness, groups = state.get(_STALENESS, self.max_staleness), held.get("group_size")
        here = self.algorithm.hparams.get("group_size")
        for name, own, there, fits in (
            (
                "strategy.max_staleness",
                self.max_staleness,
                staleness,
                self.max_staleness > 1 or staleness == 1,
            ),
            ("algo.group_size", here, groups, here == groups),
        ):
            if not fits:
                raise ValueError(
                    f"{name}={own}: checkpoint {path} was written with {there}, by which its {rows} rows in "
                    f"flight were drawn. Type --{name} {there}."
                )

    def restore_in_flight(self, columns: dict[str, Column]) -> None:
        """See `Strategy.restore_in_flight`; they are answered first."""
        self._restored = Batch.of(columns) if columns else None
