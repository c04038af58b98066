"""Where it runs: one placement a file."""

if __name__ != "rlhf_lightning.strategies":
    raise ImportError(f"This folder is imported as 'rlhf_lightning.strategies', not as {__name__!r}.")

from rlhf_lightning.strategies.auto import Auto
from rlhf_lightning.strategies.colocated import Colocated
from rlhf_lightning.strategies.deepspeed_chat import DeepSpeedChat
from rlhf_lightning.strategies.hybrid3d import HybridEngine3D
from rlhf_lightning.strategies.local import Local
from rlhf_lightning.strategies.nemo_aligner import NeMoAligner
from rlhf_lightning.strategies.one_step_off import OneStepOff
from rlhf_lightning.strategies.openrlhf import OpenRLHF
from rlhf_lightning.strategies.pipelined import Pipelined
from rlhf_lightning.strategies.split import Split
from rlhf_lightning.strategies.standalone import Standalone

DEFAULT = "colocated"
"""Short name of the strategy that runs where none is given."""

FIXED = (Colocated, Split, Standalone)
"""Strategies whose sets of models are always the same: what the automatic mapping is compared with."""

MAPPED = "auto"
"""Short name of the strategy that runs any mapping."""

__all__ = [
    "DEFAULT",
    "FIXED",
    "MAPPED",
    "Auto",
    "Colocated",
    "DeepSpeedChat",
    "HybridEngine3D",
    "Local",
    "NeMoAligner",
    "OneStepOff",
    "OpenRLHF",
    "Pipelined",
    "Split",
    "Standalone",
]
