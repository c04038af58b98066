"""Writes the embedded model's files without weights: `python -m rlhf_lightning.data.embedded [directory]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import LlamaConfig

from rlhf_lightning.data.tokenizer import build_byte_tokenizer, embedded_directory


def embedded_config() -> LlamaConfig:
    """Return the architecture of the embedded model: a Llama of 1.2 M parameters over bytes."""
    tokenizer = build_byte_tokenizer()
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def write_embedded(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    build_byte_tokenizer().save_pretrained(directory, save_jinja_files=False)
    settings = directory / "tokenizer_config.json"
    values = json.loads(settings.read_text(encoding="utf-8"))
    values["tokenizer_class"] = "PreTrainedTokenizerFast"  # read by transformers 4 and by vLLM too
    settings.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    embedded_config().save_pretrained(directory)


if __name__ == "__main__":
    write_embedded(Path(sys.argv[1]) if len(sys.argv) > 1 else embedded_directory())
