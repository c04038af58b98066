"""All models share all devices and train under ZeRO (DeepSpeed-Chat's placement)."""

from __future__ import annotations

from rlhf_lightning.strategies.colocated import Colocated


class DeepSpeedChat(Colocated):
    """One pool on DeepSpeed's ZeRO (`settings.zero`); in stage 3 all ranks gather the actor to generate."""

    strategy_name = "deepspeed-chat"
    engine = "zero"
