"""All models share all devices and train under ZeRO (DeepSpeed-Chat's placement)."""

from __future__ import annotations

from dataclasses import replace

from rlhf_lightning.strategies.colocated import Colocated
from rlhf_lightning.workers import Settings


class DeepSpeedChat(Colocated):
    """One pool on DeepSpeed's ZeRO (`settings.zero`); to generate, all ranks gather the actor.

    Args:
        devices: as for every strategy.
        address: as for every strategy.
        settings: as for every strategy; the engine is always DeepSpeed's.
        offload: as for every strategy.
        timeout_s: as for every strategy.
    """

    strategy_name = "deepspeed-chat"

    def __init__(
        self,
        *,
        devices: int | None = None,
        address: str | None = None,
        settings: Settings | None = None,
        offload: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        settings = replace(settings or Settings(), engine="zero")
        super().__init__(
            devices=devices, address=address, settings=settings, offload=offload, timeout_s=timeout_s
        )
