"""What short runs of a benchmark share: a model of any size, a trainer that only trains, an own process."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from transformers import LlamaConfig

from rlhf_lightning.spec import EMBEDDED_DIRECTORY
from rlhf_lightning.strategy import Strategy


def write_llama(directory: Path, *, hidden: int, intermediate: int, layers: int, heads: int) -> str:
    """The path of a Llama with the embedded tokenizer, initialised at the load."""
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=264,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
        dtype="float32",
    ).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_DIRECTORY / file, directory / file)
    return str(directory)


def quiet_trainer(
    strategy: Strategy, folder: str | Path, *, steps: int, callbacks: Sequence[Callback] = ()
) -> pl.Trainer:
    """On the CPU, without logger, validation and checkpoints; callbacks write to `folder`."""
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )


def alone(module: str, *words: str) -> dict[str, Any]:
    """The JSON object that `python -m benchmarks.<module> <words>` prints last, in a process of its own.

    Raises:
        RuntimeError: it fails or prints none.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{module} {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
