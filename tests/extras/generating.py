"""A model that vLLM takes, prompts for it, and what plain transformers says of the answers.

n rows, P prompt width, R response width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.engines import VLLM, Ends, TrainEngine, generation_engine
from rlhf_lightning.functional.aggregate import Counts
from rlhf_lightning.parallel import Seat
from rlhf_lightning.spec import ModelSpec, OptimizerSpec, Sampling
from tests.unit.engines import tiny
from tests.unit.engines.decoders import table
from tests.unit.engines.tiny import Fit

if TYPE_CHECKING:
    from rlhf_lightning.engines.vllm.engine import VLLMEngine

with suppress(ModuleNotFoundError):
    import deepspeed  # noqa: F401 - transformers imports it as it saves, and it writes to the environment

VOCABULARY, POSITIONS, PAD = 89, 512, 88
TOKENIZER = load_tokenizer("embedded")
"""A token is a byte."""
STOPS = tuple(range(1, 9))
"""So many that some rows end early and some do not."""
SMALL = VLLM(kv_cache_gib=0.02, max_num_seqs=16)
EXACT = 1e-4
"""Largest difference of log-probabilities in float32: sums over other numbers of tokens, in another order."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
}
"""Without and with biases, and a tied output layer."""


def write(directory: Path, name: str = "llama") -> ModelSpec:
    """Save one of the models with random weights, norms and biases too."""
    path = tiny.write_noisy(directory, MODELS[name], weights=0.15, others=0.5)
    return ModelSpec(path=str(path), optimizer=OptimizerSpec(lr=1e-2))


def ends(*tokens: int) -> Ends:
    """Responses end with these tokens."""
    return Ends(pad_token_id=PAD, eos_token_ids=tokens, tokenizer=TOKENIZER)


def vllm_of(
    source: TrainEngine,
    spec: ModelSpec,
    config: VLLM = SMALL,
    *,
    seat: Seat = tiny.SEAT,
    end: Sequence[int] = (),
) -> VLLMEngine:
    """What generates with the weights of `source`; responses end with the tokens `end`."""
    from rlhf_lightning.engines.vllm.engine import VLLMEngine  # this module is imported without vLLM, too

    engine = generation_engine(spec, source, seat=seat, ends=ends(*end), config=config)
    assert isinstance(engine, VLLMEngine)
    return engine


def prompts(lengths: Sequence[int], *, seed: int = 1) -> list[Tensor]:
    """Random sequences."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(9, VOCABULARY, (length,), generator=generator) for length in lengths]


def learn(engine: TrainEngine, sequences: Sequence[Tensor]) -> None:
    """One optimizer step that moves every log-probability; ranks of a replica are given the same."""
    rows = table(sequences)
    generator = torch.Generator().manual_seed(3)
    n = len(rows)
    rows["response_ids"] = torch.randint(9, VOCABULARY, (n, 6), generator=generator)
    rows["response_mask"] = torch.ones(n, 6, dtype=torch.bool)
    rows["advantages"] = torch.randn(n, 6, generator=generator)
    engine.accumulate(rows, Fit(), Counts.of(rows["response_mask"]), temperature=1.0)
    engine.optimizer_step()


def exported(engine: TrainEngine, directory: Path) -> PreTrainedModel:
    """The weights as a plain model of transformers, with its own attention."""
    engine.export(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    assert isinstance(model, PreTrainedModel)
    return model


def judged(
    model: PreTrainedModel, sequences: Sequence[Tensor], answers: TensorDict, sampling: Sampling
) -> Tensor:
    """[n, R], what the answers' log_probs are to be: of a whole forward each, 0 outside the mask."""
    expected = torch.zeros(answers["log_probs"].shape)
    for row, prompt in enumerate(sequences):
        length = int(answers["response_mask"][row].sum())
        response = answers["response_ids"][row, :length]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
        expected[row, :length] = log_p.gather(-1, response[:, None])[:, 0]
    return expected
