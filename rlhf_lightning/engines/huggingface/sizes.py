"""Sizes that a model's configuration tells: how many tokens there are, and how many a sequence may have.

A model with LongRoPE (Phi-3 and Phi-4 with 128k positions) has two sets of factors. transformers rotates all
rows of a call by the long ones as soon as one row exceeds the original length, and rows must not change each
other: so such a model has the positions of its original length only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from transformers import PreTrainedConfig

from rlhf_lightning.engines.huggingface.source import config_directory, read_json
from rlhf_lightning.retold import retold
from rlhf_lightning.spec import ModelSpec

_LONG_ROPE = ("longrope", "su")
"""Its names as a `rope_type`, the second one of the first Phi-3."""
_ORIGINAL = "original_max_position_embeddings"


def max_positions(model: ModelSpec | PreTrainedConfig) -> int | None:
    """Most tokens of a sequence; None where the configuration does not tell."""
    stated = _stated(model)
    known = (stated.get(key) for key in ("max_position_embeddings", "n_positions"))
    found = (next(filter(None, map(_whole, known)), None), _original_length(stated))
    return min(filter(None, found), default=None)


def original_positions(model: ModelSpec | PreTrainedConfig) -> int | None:
    """Positions of a model with LongRoPE for which its short factors hold; None of other models."""
    return _original_length(_stated(model))


def num_tokens(spec: ModelSpec) -> int | None:
    """Size of the vocabulary, according to config.json; None where it does not tell."""
    return _whole(_stated(spec).get("vocab_size"))


def padding_token(spec: ModelSpec) -> int | None:
    """The token that pads rows in other programs, according to config.json; None where it does not tell."""
    return _whole(_stated(spec).get("pad_token_id"))


def explaining_positions(model: ModelSpec | PreTrainedConfig) -> AbstractContextManager[None]:
    """Add to an error about too many tokens why a model with LongRoPE takes no more."""

    def explained(said: str) -> str:
        if (length := original_positions(model)) is None:
            return said
        return (
            f"{said} It is a model with LongRoPE, of which {_ORIGINAL}={length} are used: one longer row "
            "would change the numbers of all rows beside it."
        )

    return retold(explained)


def _stated(model: ModelSpec | PreTrainedConfig) -> dict[str, object]:
    """What the configuration says of the decoder; nothing where the hub does not give it."""
    if isinstance(model, PreTrainedConfig):
        text = model.get_text_config()
        # Some families have it under another name.
        return text.to_dict() | {"max_position_embeddings": getattr(text, "max_position_embeddings", None)}
    directory = config_directory(model)
    config = {} if directory is None else read_json(directory / "config.json")
    text_config = config.get("text_config")
    return config | (text_config if isinstance(text_config, dict) else {})


def _original_length(stated: dict[str, object]) -> int | None:
    """`original_positions` of what a configuration says."""
    found = stated.get("rope_parameters") or stated.get("rope_scaling")
    rope = found if isinstance(found, dict) else {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    if not any(kind.get("rope_type", kind.get("type")) in _LONG_ROPE for kind in kinds):
        return None
    return min(filter(None, (_whole(one.get(_ORIGINAL)) for one in (stated, *kinds))), default=None)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
