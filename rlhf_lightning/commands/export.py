"""`rlhf export CHECKPOINT OUT [ROLE]`: writes a role's model in a checkpoint as a Hugging Face directory.

With --adapters it writes only the adapters of a model trained with LoRA, in a format that peft reads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_lightning import checkpoint as files
from rlhf_lightning import directories
from rlhf_lightning.checkpoint_source import CheckpointSource
from rlhf_lightning.commands.parser import Parser
from rlhf_lightning.engines import (
    ADAPTER_CONFIG,
    TOKENIZER_FILES,
    FSDPEngine,
    check_checkpoint,
    check_model,
    export_checkpoint,
    saved_lora,
)
from rlhf_lightning.retold import retold
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.stores import check_local

ADAPTERS = "--adapters"
CONFIG = "config.json", ADAPTER_CONFIG
"""The file, written last, that makes a directory one of Hugging Face, or of peft (indexed by --adapters)."""
WEIGHTS = "model*.safetensors*", "adapter_model.*"
"""Files of weights and their index: old ones are removed, since they could be taken for the new model's."""


def run(arguments: Sequence[str]) -> None:
    """Write the model of a role in a checkpoint as a Hugging Face directory; in this process, without Ray.

    Adapters are merged, and weights are in the type that the run computed in. With --adapters only the
    adapters are written, in float32, in a format that peft reads.

    Raises:
        ValueError: the arguments are wrong, there is no checkpoint, it holds no such role, or its run
            replaced it meanwhile.
        OSError: nothing can be written there.
    """
    parser = Parser("export", __doc__)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="of a run, such as runs/checkpoints/last.ckpt")
    add("out", metavar="OUT", help="directory to write")
    add("role", metavar="ROLE", nargs="?", help="whose model; by default the only one, else actor")
    add(ADAPTERS, action="store_true", help="write the adapters alone, in a format that peft reads")
    options = parser.parse_intermixed_args(arguments)
    check_local(options.out, option="OUT")
    given, out, alone = options.checkpoint, Path(options.out), options.adapters
    source = CheckpointSource(files.find(given))
    directory = source.directory
    state = files.read_state(directory)
    models = state.get(files.MODELS)
    if not isinstance(models, dict):
        raise ValueError(f"checkpoint {given}: does not say which models it holds. Type another.")
    role = options.role or (next(iter(models)) if len(models) == 1 else "actor")
    if role not in models:
        raise ValueError(f"checkpoint {given}: holds no role {role!r}; it holds {sorted(models)}.")
    _check_out(out, directory, state.get(files.PATHS, {}), other=CONFIG[not alone])
    path, head, dtype = (models[role][key] for key in ("path", "head", "dtype"))
    spec = ModelSpec(path=path, dtype=dtype, lora=saved_lora(directory / role))
    began = f"checkpoint {given}: config and tokenizer are those of the model that {role} began with, and"
    with retold(lambda said: f"{began} {said} Put it back there, or a link to it."):
        check_model(spec)
    check_checkpoint(spec, head, directory / role)
    if alone and spec.lora is None:
        raise ValueError(f"checkpoint {given}: {role} was trained without lora. Leave {ADAPTERS} out.")
    with directories.adding(out, last=CONFIG[alone], replaces=(WEIGHTS[alone], *TOKENIZER_FILES)) as fresh:
        if alone or not export_checkpoint(directory / role, fresh, spec=spec, head=head):
            engine = FSDPEngine(spec, head=head)
            engine.load(directory / role, trained=False)
            (engine.export_adapters if alone else engine.export)(fresh)
        source.check()
    sys.stdout.write(f"exported {role} of {given} to {out}\n")


def _check_out(out: Path, checkpoint: Path, paths: object, *, other: str) -> None:
    """Refuse to write into a checkpoint, over a model that a resumed run reads, or adapters beside a model.

    Args:
        out: where to write.
        checkpoint: what is exported.
        paths: by role, the models that the run began with.
        other: the file of a directory that holds adapters where a model is exported, or a model for adapters.
    """
    if (out / other).is_file():
        kind = "adapters" if other == ADAPTER_CONFIG else "a model"
        raise ValueError(
            f"{out}: holds {kind} ({other}); transformers would load both and add the adapters to the "
            "model. Type another directory."
        )
    target, held = out.resolve(), checkpoint.resolve()
    if held == target or held in target.parents:
        raise ValueError(
            f"{out}: lies in the checkpoint, which the run's next one replaces. Type another directory."
        )
    for role, path in paths.items() if isinstance(paths, dict) else ():
        if Path(path).resolve() == target:
            raise ValueError(
                f"{out}: is the model that {role} began with, and a run that resumes from the "
                "checkpoint reads it again. Type another directory."
            )
