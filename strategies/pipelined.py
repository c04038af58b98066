"""Every model alone, and answers are scored as they end, while the generator goes on with the longer ones."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_lightning.controller import Caller
from rlhf_lightning.controller.cluster import ResourcePool
from rlhf_lightning.strategies.openrlhf import OpenRLHF
from rlhf_lightning.workers import GenerationInParts, Settings


class Pipelined(OpenRLHF):
    """As OpenRLHF, but generation, scoring and preparation overlap, part by part of a batch.

    The rows whose answers end first are the first part, and the long tail is the last.

    Args:
        parts: in which a batch is handed on; each has the rows that end next.
        generator_devices: as for OpenRLHF.
        devices: as for every strategy, those of the generator among them.
        address: as for every strategy.
        settings: as for every strategy.
        timeout_s: as for every strategy.
    """

    strategy_name = "pipelined"

    def __init__(
        self,
        *,
        parts: int = 8,
        generator_devices: int | None = None,
        devices: int | None = None,
        address: str | None = None,
        settings: Settings | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(
            generator_devices=generator_devices,
            devices=devices,
            address=address,
            settings=settings,
            timeout_s=timeout_s,
        )
        if parts < 2:
            raise ValueError(
                f"strategy.parts={parts}: a batch that is handed on whole is scored when its last answer "
                "has ended. Try 8, or --strategy openrlhf."
            )
        self.parts = parts
        self.separated: GenerationInParts | None = None

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """See `OpenRLHF.place`.

        Raises:
            ValueError: models would share devices, on which nothing overlaps.
        """
        if devices is not None and devices < len(roles):
            raise ValueError(
                f"Pipelined(devices={devices}): {len(roles)} models ({', '.join(roles)}) would share "
                f"{devices} devices, and on one device they take turns. Try devices={len(roles)}, or "
                f"--strategy colocated --strategy.devices {devices}."
            )
        return super().place(roles, devices)

    def separate(self, actor: Caller, generator: Caller) -> GenerationInParts:
        """What the actor's handle calls."""
        again = self.algorithm.main_actor.recompute_log_probs
        return GenerationInParts(actor, generator, recompute_log_probs=again, parts=self.parts)
