"""What a role is attached to."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.controller import Caller, Worker
from rlhf_lightning.engines import GenerationEngine, TrainEngine


@dataclass
class Binding:
    """What a role is attached to: a handle has a caller, a worker all else, a description nothing."""

    caller: Caller | None = None
    """What a handle sends its calls to."""
    worker: Worker | None = None
    """This rank's place in the job."""
    engine: TrainEngine | None = None
    """This rank's part of the model; None where the role has no model."""
    generator: GenerationEngine | None = None
    """What generates on this rank, once it was asked for."""
