"""`rlhf export CHECKPOINT OUT [ROLE]`: a role's model of a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_lightning import checkpoint as files
from rlhf_lightning.engines import FSDPEngine, saved_lora
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.strategy import MODELS

USAGE = "usage: rlhf export CHECKPOINT OUT [ROLE]   (ROLE: the only one, else actor)"


def run(arguments: Sequence[str]) -> None:
    """Write a role's model of a checkpoint as a Hugging Face directory, adapters merged; no Ray, one process.

    Its weights are in the type that the run computed in.

    Raises:
        ValueError: the arguments are others, there is no checkpoint, or it holds no such role.
        OSError: nothing can be written there.
    """
    if not 2 <= len(arguments) <= 3:
        raise ValueError(USAGE)
    directory, out = files.find(arguments[0]), Path(arguments[1])
    models = files.read_state(directory)[MODELS]
    assert isinstance(models, dict)
    role = (*arguments[2:], *(models if len(models) == 1 else ()), "actor")[0]
    if role not in models:
        raise ValueError(f"checkpoint {arguments[0]}: holds no role {role!r}; it holds {sorted(models)}.")
    _make(out)
    path, head, dtype = (models[role][key] for key in ("path", "head", "dtype"))
    engine = FSDPEngine(ModelSpec(path=path, dtype=dtype, lora=saved_lora(directory / role)), head=head)
    engine.load_weights(directory / role)
    engine.export(out)
    sys.stdout.write(f"exported {role} of {arguments[0]} to {out}\n")


def _make(directory: Path) -> None:
    """Make the directory before anything is loaded.

    Raises:
        OSError: nothing can be written there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
