"""The token with which rows of a model with one number per token are padded in other programs.

transformers reads such a model at the last token that is not `pad_token_id` of config.json, and takes one row
at a time where there is none. Here its number is trained and read at the end token:

    tokens             2  +  3  =  5  <eos>
    pad is <pad>                        ^      the same number in both
    pad is <eos>                     ^         transformers reads what was never trained
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_lightning.engines.huggingface.source import config_source, has_tokenizer, read_json
from rlhf_lightning.spec import ModelSpec

logger = logging.getLogger(__name__)

_NAMING = "tokenizer_config.json", "special_tokens_map.json"
"""Files in which a tokenizer's padding token is named; newer tokenizers have the first alone."""


def pad_apart(directory: Path, spec: ModelSpec) -> None:
    """Let config.json and the tokenizer of an exported model name a padding token that is no end token.

    Both keep theirs where the tokenizer's is none. Warns where the tokenizer has no token for it.

    Args:
        directory: of the export, with the tokenizer's files, if it has a tokenizer.
        spec: of the model; its tokenizer is the same.
    """
    if not has_tokenizer(spec):
        return
    tokenizer = AutoTokenizer.from_pretrained(config_source(spec))
    file = directory / "config.json"
    config = read_json(file)
    text = config.get("text_config")
    parts = [config, *([text] if isinstance(text, dict) else [])]
    pad = _padding(tokenizer, parts[-1], ends=_also_ends(directory))
    if pad is None:
        logger.warning(
            "path=%s: its tokenizer has no token but %r to pad with. transformers reads the exported model "
            "one row at a time only, or before that token, where its number is not. Give the tokenizer a "
            "padding token, and train again.",
            spec.path,
            tokenizer.eos_token,
        )
        return
    for part in parts:
        part["pad_token_id"] = pad
    _write(file, config)
    if pad != tokenizer.pad_token_id:
        for named in _NAMING:
            if (found := directory / named).exists():
                _write(found, read_json(found) | {"pad_token": tokenizer.convert_ids_to_tokens(pad)})


def _padding(
    tokenizer: PreTrainedTokenizerBase, config: dict[str, object], *, ends: set[object]
) -> int | None:
    """The tokenizer's padding token; else the model's, the unknown one or the last special one."""
    special = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    others = (config.get("pad_token_id"), tokenizer.unk_token_id, *sorted(special, reverse=True))
    wanted = (tokenizer.pad_token_id, *(number for number in others if number not in ends))
    size = config.get("vocab_size")
    known = {n for n in tokenizer.get_vocab().values() if not isinstance(size, int) or n < size}
    known.discard(tokenizer.eos_token_id)
    return next((number for number in wanted if isinstance(number, int) and number in known), None)


def _also_ends(directory: Path) -> set[object]:
    """Tokens at which the model stops, according to generation_config.json."""
    file = directory / "generation_config.json"
    found = read_json(file).get("eos_token_id") if file.exists() else None
    return {*found} if isinstance(found, list) else {found}


def _write(file: Path, content: dict[str, object]) -> None:
    file.unlink()  # it may be a copy of one that nobody may write
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
