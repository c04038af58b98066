"""Probes: small runs of the project's own engines to be timed, and predictions of the same runs.

They compute as the peak was measured that their shares are of: in bfloat16 on a GPU, in float32 on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhf_lightning.functional import Counts, PolicyLoss
from rlhf_lightning.mapping import simulate
from rlhf_lightning.mapping.fit import Observation
from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.spec import ModelSpec, Sampling

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlhf_lightning.engines.fsdp.engine import FSDPEngine

Clock = Callable[[Callable[[], object]], float]
"""Times a call, in seconds."""

_SIZES = ((64, 2), (128, 6), (384, 3))
"""Hidden size and layers of the models."""
_ROWS = (4, 24)
_GPU_SIZES, _GPU_ROWS = (*_SIZES, (4096, 2)), (4, 128)
"""On a GPU a larger model and more rows, whose products take longer than their launches."""
_PROMPT, _RESPONSE = 16, 32
_VOCAB = 256
_KINDS = ("infer", "train", "generate")


@dataclass(frozen=True)
class _Probe:
    """One model and number of rows."""

    hidden: int
    layers: int
    rows: int
    gpu: bool

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            name=f"{self.hidden}x{self.layers}", layers=self.layers, hidden=self.hidden, vocab=_VOCAB,
            intermediate=3 * self.hidden, heads=self.hidden // 32, kv_heads=self.hidden // 64, tied=True,
        )  # fmt: skip

    @property
    def workload(self) -> Workload:
        """What the engines do on one device: one update, all rows at once, nothing recomputed."""
        return Workload(
            prompt=_PROMPT, real_prompt=_PROMPT, response=_RESPONSE, batch=self.rows, mini_batches=1,
            packed=True, max_resident=0, micro_batch_tokens=2**20, recompute=False,
            element=2 if self.gpu else 4, masters=self.gpu,
        )  # fmt: skip


def _probes(*, gpu: bool) -> dict[str, _Probe]:
    sizes, many = (_GPU_SIZES, _GPU_ROWS) if gpu else (_SIZES, _ROWS)
    found = [_Probe(hidden, layers, rows, gpu) for (hidden, layers), rows in product(sizes, many)]
    return {f"{probe.shape.name}x{probe.rows}": probe for probe in found}


def observations(seconds: Mapping[str, float], *, gpu: bool) -> list[Observation]:
    """The seconds that `run` has measured, each with its prediction.

    Args:
        seconds: by name of the probe, as `run` returns them.
        gpu: whether they are a GPU's.
    """
    probes = _probes(gpu=gpu)
    found = []
    for key, value in seconds.items():
        kind, _, name = key.partition(" ")
        found.append(Observation(key, value, _prediction(kind, probes[name])))
    return found


def _prediction(kind: str, probe: _Probe) -> Callable[[Hardware], float]:
    work = (probe.shape, ParallelLayout(), probe.workload)

    def predict(hardware: Hardware) -> float:
        if kind == "generate":
            estimate = simulate.generate(hardware, *work, kv_bytes=hardware.memory_bytes)
        else:
            estimate = (simulate.train if kind == "train" else simulate.infer)(hardware, *work)
        return estimate.seconds - hardware.overhead.call

    return predict


def run(directory: Path, device: torch.device, clock: Clock) -> dict[str, float]:
    """Time a forward pass, an update and a generation of each model and number of rows.

    Returns:
        Seconds by `<kind> <hidden>x<layers>x<rows>`.
    """
    seconds = {}
    for name, probe in _probes(gpu=device.type == "cuda").items():
        for kind, call in zip(_KINDS, _calls(probe, directory / name, device), strict=True):
            seconds[f"{kind} {name}"] = clock(call)
    return seconds


def _calls(probe: _Probe, directory: Path, device: torch.device) -> list[Callable[[], object]]:
    from rlhf_lightning.engines import Ends, NativeGenerator  # noqa: PLC0415

    engine = _engine(probe, directory, device)
    rows = made_rows(probe.rows, prompt=_PROMPT, response=_RESPONSE, vocabulary=_VOCAB).to(device)
    loss, counts = PolicyLoss(), Counts.of(rows["response_mask"])

    def infer() -> object:
        return engine.infer(rows, temperature=1.0)

    def train() -> None:
        engine.accumulate(rows, loss, counts, temperature=1.0)
        engine.optimizer_step()

    def generate() -> None:
        with engine.generating() as decoder:
            generator = NativeGenerator(decoder, device=device, ends=Ends(pad_token_id=0))
            generator.generate(rows, sampling=Sampling(max_new_tokens=_RESPONSE), seed=0)

    return [infer, train, generate]


def _engine(probe: _Probe, directory: Path, device: torch.device) -> FSDPEngine:
    from rlhf_lightning.engines.fsdp.engine import FSDP, FSDPEngine  # noqa: PLC0415

    _write_config(probe.shape, directory)
    model = ModelSpec(path=str(directory), dtype="bfloat16" if probe.gpu else "float32")
    return FSDPEngine(model, device=device, config=FSDP(max_tokens_per_micro_batch=65536))


def made_rows(count: int, *, prompt: int, response: int, vocabulary: int) -> TensorDict:
    """Rows of full length to score, to answer and to learn from: the same ones every time.

    Args:
        count: B, number of rows.
        prompt: P, tokens of each prompt.
        response: R, tokens of each response.
        vocabulary: number of words, of which all but word 0 are drawn.

    Returns:
        Prompts [B, P] and responses [B, R] with their masks, `row_ids` [B], and for a `PolicyLoss`
        `log_probs` and `advantages` [B, R] float32.
    """
    from tensordict import TensorDict  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        torch.randint(1, vocabulary, (count, width), generator=generator) for width in (prompt, response)
    )
    columns = {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts, dtype=torch.bool),
        "response_ids": responses, "response_mask": torch.ones_like(responses, dtype=torch.bool),
        "log_probs": torch.zeros(count, response), "advantages": torch.ones(count, response),
        "row_ids": torch.arange(count),
    }  # fmt: skip
    return TensorDict(columns, batch_size=[count])


def _write_config(shape: ModelShape, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "tie_word_embeddings": True, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
