"""All models share all devices and train under ZeRO (DeepSpeed-Chat's placement)."""

from __future__ import annotations

from rlhf_lightning.strategies.colocated import Colocated


class DeepSpeedChat(Colocated):
    """One pool on DeepSpeed's ZeRO (`settings.zero`); to generate, all ranks gather the actor."""

    strategy_name = "deepspeed-chat"
    engine = "zero"
