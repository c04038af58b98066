"""Writes the embedded model's files without weights: `python -m tests.embedded_model [directory]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from rlhf_lightning.spec import EMBEDDED_DIRECTORY

NUM_BYTES = 256
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>", "<extra_0>", "<extra_1>")
"""Tokens 256 to 263: 264 in all, so that a vocabulary divides by 2, 4 and 8 devices."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose token b < 256 is the byte b of the UTF-8 text, without merges.

    Example:
        >>> build_byte_tokenizer().encode("7é")
        [55, 195, 169]
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    vocabulary |= {token: NUM_BYTES + index for index, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        padding_side="left",
    )


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte (GPT-2's table, Radford 2019)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


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
    write_embedded(Path(sys.argv[1]) if len(sys.argv) > 1 else EMBEDDED_DIRECTORY)
