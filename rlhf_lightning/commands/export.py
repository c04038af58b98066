"""`rlhf export CHECKPOINT OUT [ROLE]`: a role's model of a checkpoint as a Hugging Face directory.

With --adapters those of a model that was trained with lora, alone, as peft reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_lightning import checkpoint as files
from rlhf_lightning.engines import ADAPTER_CONFIG, FSDPEngine, check_checkpoint, check_model, saved_lora
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.strategy import MODELS

ADAPTERS = "--adapters"
USAGE = f"usage: rlhf export CHECKPOINT OUT [ROLE] [{ADAPTERS}]   (ROLE: the only one, else actor)"
CONFIG = "config.json", ADAPTER_CONFIG
"""Makes a directory one of Hugging Face, or of peft; without weights beside it, of a fresh model."""
WEIGHTS = "model*.safetensors*", "adapter_model.*"
"""Shards and their index: of the model before they could be taken for this one's."""


def run(arguments: Sequence[str]) -> None:
    """Write a role's model of a checkpoint as a Hugging Face directory; no Ray, one process.

    Adapters are merged, and weights are in the type that the run computed in. With --adapters these are
    written alone, in float32, as peft reads them.

    Raises:
        ValueError: the arguments are others, there is no checkpoint, or it holds no such role.
        OSError: nothing can be written there.
    """
    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write(f"{USAGE}\n\n{__doc__}\n")
        return
    alone = ADAPTERS in arguments
    arguments = [word for word in arguments if word != ADAPTERS]
    if not 2 <= len(arguments) <= 3:
        raise ValueError(USAGE)
    directory, out = files.find(arguments[0]), Path(arguments[1])
    state = files.read_state(directory)
    models = state.get(MODELS)
    if not isinstance(models, dict):
        raise ValueError(f"checkpoint {arguments[0]}: does not say which models it holds. Type another.")
    role = (*arguments[2:], *(models if len(models) == 1 else ()), "actor")[0]
    if role not in models:
        raise ValueError(f"checkpoint {arguments[0]}: holds no role {role!r}; it holds {sorted(models)}.")
    _check_out(out, directory, state.get(files.PATHS, {}))
    path, head, dtype = (models[role][key] for key in ("path", "head", "dtype"))
    spec = ModelSpec(path=path, dtype=dtype, lora=saved_lora(directory / role))
    try:
        check_model(spec)
    except ValueError as err:
        raise ValueError(
            f"checkpoint {arguments[0]}: config and tokenizer are those of the model that {role} began with, "
            f"and {err} Put it back there, or a link to it."
        ) from err
    check_checkpoint(spec, head, directory / role)
    if alone and spec.lora is None:
        raise ValueError(f"checkpoint {arguments[0]}: {role} was trained without lora. Leave {ADAPTERS} out.")
    with files.adding(out, last=CONFIG[alone], replaces=WEIGHTS[alone]) as fresh:
        engine = FSDPEngine(spec, head=head)
        engine.load_weights(directory / role)
        (engine.export_adapters if alone else engine.export)(fresh)
    sys.stdout.write(f"exported {role} of {arguments[0]} to {out}\n")


def _check_out(out: Path, checkpoint: Path, paths: object) -> None:
    """Refuse to write into a checkpoint, or over a model that it goes on from.

    Raises:
        ValueError: the directory is one of these.
    """
    target, held = out.resolve(), checkpoint.resolve()
    if held == target or held in target.parents:
        raise ValueError(
            f"{out}: lies in the checkpoint, and would be gone with the next. Type another directory."
        )
    for role, path in paths.items() if isinstance(paths, dict) else ():
        if Path(path).resolve() == target:
            raise ValueError(
                f"{out}: is the model that {role} began with, which whoever goes on from the checkpoint "
                "reads again. Type another directory."
            )
