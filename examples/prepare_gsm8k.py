"""Prepare what configs/gsm8k_smollm2.yaml needs: the model SmolLM2-135M-Instruct and GSM8K's questions.

    python examples/prepare_gsm8k.py                                              from the Hugging Face hub
    python examples/prepare_gsm8k.py --model model.gguf --questions train.jsonl   from files that are here

`--model` also takes a directory or a hub name. A GGUF file needs the packages `gguf` and `accelerate`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def write_model(source: str, directory: Path) -> None:
    """Save a model and its tokenizer as a Hugging Face directory, in bfloat16."""
    path = Path(source)
    options: dict[str, object] = {}
    if path.suffix == ".gguf":
        source, options = str(path.parent), {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    if options:
        options["quantization_config"] = GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_questions(source: Path | None, file: Path) -> None:
    """Copy a JSONL file, or download the training questions."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if source is None:
        load_dataset("openai/gsm8k", "main", split="train").to_json(file)
    else:
        shutil.copy(source, file)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=MODEL)
parser.add_argument("--questions", type=Path)
args = parser.parse_args()
write_questions(args.questions, Path("data/gsm8k_train.jsonl"))
write_model(args.model, Path("models/smollm2-135m-instruct"))
