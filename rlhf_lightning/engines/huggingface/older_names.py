"""What programs on transformers 4 read of an exported config.json.

Version 5 writes the base of rotary embeddings and their scaling in `rope_parameters`, and the type of the
weights as `dtype`. Version 4 knows neither, and would compute with the base 10,000 without a word.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_lightning.engines.huggingface.source import read_json

_BESIDE = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
"""Older names of what stood outside of the scaling, at the top."""
_OTHERWISE = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
"""Those of other families."""
_PHI3 = {"rope_type": "type", "short_factor": "short_factor", "long_factor": "long_factor"}
"""The scaling of Phi-3: version 4 wants these three alone, by their older names."""
_BESIDE_PHI3 = {"type", "original_max_position_embeddings"}
"""What it reads elsewhere: under the other name, and at the top."""


def add_older_names(file: Path) -> None:
    """Write values of a config.json under their older names too; version 5 reads the same as before.

    Models whose layers have rotary embeddings of several kinds, such as Gemma 3, keep the newer names alone:
    each family had older ones of its own.
    """
    config = read_json(file)
    older: dict[str, object] = {}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        names = _OTHERWISE.get(str(config.get("model_type")), _BESIDE)
        older |= {name: rope[key] for key, name in names.items() if key in rope}
        scaling = {key: value for key, value in rope.items() if key not in names}
        if config.get("model_type") == "phi3" and scaling.keys() - _BESIDE_PHI3 == _PHI3.keys():
            scaling = {name: scaling[key] for key, name in _PHI3.items()}
        older["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
    if isinstance(config.get("dtype"), str):
        older["torch_dtype"] = config["dtype"]
    file.write_text(json.dumps(config | older, indent=2, sort_keys=True) + "\n", encoding="utf-8")
