"""Every model alone; answers are scored as they end, while the generator continues with the longer ones."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer

from rlhf_lightning.controller import Caller, ResourcePool
from rlhf_lightning.strategies.openrlhf import OpenRLHF
from rlhf_lightning.workers import GenerationInParts


class Pipelined(OpenRLHF):
    """As OpenRLHF, but generation overlaps with the models that read its answers, part by part of a batch.

    The rows whose answers end first are the first part; the longest answers are in the last.
    """

    strategy_name = "pipelined"
    of_generation = ("generator_devices", "parts")

    parts: int = 8
    """Parts in which the answers of a batch are passed on; each has the rows that end next."""

    def __post_init__(self) -> None:
        """Refuse a batch in one part."""
        super().__post_init__()
        if self.parts < 2:
            raise ValueError(
                f"strategy.parts={self.parts}: a batch that is handed on whole is scored when its last "
                "answer has ended. Try 8, or --strategy openrlhf."
            )

    def setup(self, trainer: Trainer) -> None:
        """See `Strategy.setup`.

        Raises:
            ValueError: answers have several turns, or the actor's class has an `answer` of its own.
        """
        self.refuse_whole_answers(instead="--strategy openrlhf")
        super().setup(trainer)

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """See `OpenRLHF.place`.

        Raises:
            ValueError: models would share devices, on which nothing overlaps.
        """
        models = self.apart(roles)
        if devices is not None and devices < len(models):
            raise ValueError(
                f"{type(self).__name__}(devices={devices}): {len(models)} models ({', '.join(models)}) would "
                f"share {devices} devices, and on one device they take turns. Try devices={len(models)}, or "
                f"--strategy colocated --strategy.devices {devices}."
            )
        return super().place(roles, devices)

    def apart(self, roles: Sequence[str]) -> tuple[str, ...]:
        """See `OpenRLHF.apart`; functions too: behind another role they would wait for the last part."""
        return tuple(roles)

    def make_generation(
        self, actor: Caller, generator: Caller, *, recompute_log_probs: bool
    ) -> GenerationInParts:
        """See `OpenRLHF.make_generation`."""
        return GenerationInParts(actor, generator, recompute_log_probs=recompute_log_probs, parts=self.parts)
