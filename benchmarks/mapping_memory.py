"""Predicted bytes beside those that an engine and its cache of keys and values hold, for two models.

    python -m benchmarks.mapping_memory

The embedded model, and one with the sizes of SmolLM2-135M, in float32 and in bfloat16 with float32 masters:
one update, one generation. Writes results/mapping_memory.json.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import environments
from benchmarks.spread import machine
from rlhf_lightning.engines import FSDPEngine, NativeGenerator
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.functional import Counts, PolicyLoss
from rlhf_lightning.mapping import memory, shapes
from rlhf_lightning.mapping.probe import made_rows
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.spec import EMBEDDED, ModelSpec, Sampling

ROWS, PROMPT, RESPONSE = 6, 8, 16
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@contextmanager
def watched() -> Iterator[list[Cache]]:
    """The caches that are made within."""
    made: list[Cache] = []
    plain = Cache.__init__

    def noted(self: Cache, slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        plain(self, slots, capacity, dtype=dtype)
        made.append(self)

    Cache.__init__ = noted  # type: ignore[method-assign]
    try:
        yield made
    finally:
        Cache.__init__ = plain  # type: ignore[method-assign]


def measured(path: str, dtype: str) -> dict[str, int]:
    """Bytes of one engine."""
    engine = FSDPEngine(ModelSpec(path=path, dtype=dtype))  # type: ignore[arg-type]
    batch = made_rows(ROWS, prompt=PROMPT, response=RESPONSE, vocabulary=200)
    engine.accumulate(batch, PolicyLoss(), Counts.of(batch["response_mask"]), temperature=1.0)
    gradients = engine.memory()["gradients"]
    engine.optimizer_step()
    held = engine.memory()
    with watched() as caches, engine.generating() as decoder:
        generator = NativeGenerator(decoder, device="cpu", ends=Ends(pad_token_id=0))
        generator.generate(batch, sampling=Sampling(max_new_tokens=RESPONSE), seed=0)
        kept = sum(block.nbytes for cache in caches for pair in cache.layers.values() for block in pair)
    return {
        "parameters": held["parameters"],
        "gradients": gradients,
        "states": held["optimizer"],
        "keys and values": kept,
    }


def predicted(path: str, dtype: str) -> dict[str, float]:
    """The same from the formulas."""
    shape, half = shapes.load(path), dtype == "bfloat16"
    workload = Workload(
        prompt=PROMPT, real_prompt=PROMPT, response=RESPONSE, batch=ROWS, mini_batches=1,
        element=2 if half else 4, masters=half, sharding="none",
    )  # fmt: skip
    found = memory.training(shape, ParallelLayout(), workload)
    kept = memory.kv_needed(shape, ParallelLayout(), workload)
    return {
        "parameters": found.parameters,
        "gradients": found.gradients,
        "states": found.states,
        "keys and values": kept,
    }


def main() -> None:
    """Measure, print, and write the result."""
    environments.parser_of(__doc__).parse_args()
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SMOLLM2))
        for name, path in (("embedded", EMBEDDED), ("135M", directory)):
            for dtype in ("float32", "bfloat16"):
                real, said = measured(path, dtype), predicted(path, dtype)
                for part, size in real.items():
                    error = said[part] / size - 1
                    print(f"{name:<10}{dtype:<10}{part:<17}{size / 1e6:>10.2f} MB  predicted {error:+.1%}")
                results[f"{name} {dtype}"] = {"measured": real, "predicted": said}
    print(f"written: {environments.write_result('mapping_memory', {'machine': machine(), **results})}")


if __name__ == "__main__":
    main()
