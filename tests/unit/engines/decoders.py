"""Tiny decoders of the kinds that attention has to serve, and slow references for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

VOCAB = 70
WINDOW = 5
_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_ROPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "initializer_range": 0.2,
    **_SPECIAL,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": _ROPE,
    "qwen2": {**_ROPE, "tie_word_embeddings": True},
    "mistral": {**_ROPE, "sliding_window": WINDOW},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": VOCAB,
        "initializer_range": 0.2,
        **_SPECIAL,
    },
}
KINDS = tuple(_OPTIONS)
ORIGINAL = 16
"""Positions for which the short factors of the model with LongRoPE hold."""
LATENT: dict[str, Any] = {
    **_ROPE,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
"""Latent attention, whose values are narrower than its keys; `head_dim` tells the width of neither."""
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_OPTIONS["minicpm3"] = LATENT
_OPTIONS["deepseek_v2"] = _OPTIONS["deepseek_v3"] = LATENT | EXPERTS
_OPTIONS["qwen3"] = {**_ROPE, "head_dim": 12}
WIDE = "qwen3"
"""Its heads are wider than the hidden size divided by their number."""
NARROW = ("minicpm3", "deepseek_v2", "deepseek_v3")
"""Those whose values are narrower than their keys."""
_OPTIONS["phi3"] = {
    **_ROPE,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}
MASKED = {"num_experts_per_tok": 2, "sliding_window": WINDOW}
_OPTIONS["phimoe"] = {**_ROPE, **MASKED, "num_local_experts": 4}
MIXED = "qwen2_moe"
"""Its first layer has a window, the other none."""
_OPTIONS[MIXED] = {
    **_ROPE,
    **MASKED,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "use_sliding_window": True,
    "max_window_layers": 1,
}
WINDOWED = ("mistral", "phimoe", MIXED)
"""Those with windows; the mixtures of experts tell them to their mask alone."""


def decoder(kind: str) -> PreTrainedModel:
    """Seeded weights, biases too; evaluation mode, eager attention of transformers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **_OPTIONS[kind])
    module = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    module.train(False)
    return module


def other(kind: str, **options: int) -> PreTrainedModel:
    """A model that attention does not serve, as small as it goes."""
    config = AutoConfig.for_model(kind, vocab_size=8, pad_token_id=0, **options)
    return cast(PreTrainedModel, AutoModel.from_config(config))


def token_lists(lengths: Sequence[int], *, seed: int = 1) -> list[Tensor]:
    """Random sequences."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def reference(module: PreTrainedModel, sequence: Tensor) -> Tensor:
    """Logits [T, V] of one sequence through transformers' own attention."""
    logits: Tensor = module(input_ids=sequence[None], use_cache=False).logits[0]
    return logits


def table(prompts: Sequence[Tensor], *, first_id: int = 100) -> TensorDict:
    """Rows of prompts, padded on the left."""
    width = max(map(len, prompts), default=0) + 1
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = True
    columns = {"prompt_ids": ids, "prompt_mask": mask, "row_ids": torch.arange(len(prompts)) + first_id}
    return TensorDict(columns, batch_size=[len(prompts)])


def asked(*lengths: int, samples: int = 1) -> TensorDict:
    """Prompts of these lengths, each `samples` times."""
    width, generator = max(lengths), torch.Generator().manual_seed(1)
    ids = torch.randint(1, 61, (len(lengths), width), generator=generator).repeat_interleave(samples, 0)
    mask = torch.arange(width) >= width - torch.tensor(lengths).repeat_interleave(samples)[:, None]
    columns = {"prompt_ids": ids, "prompt_mask": mask, "row_ids": torch.arange(len(ids))}
    return TensorDict(columns, batch_size=len(ids))


def agree(left: Mapping[str, Tensor] | TensorDict, right: TensorDict, *, within: float = 1e-5) -> None:
    """The same answers; matrix products over other numbers of rows add in another order."""
    assert torch.equal(left["response_ids"], right["response_ids"])
    assert torch.equal(left["response_mask"], right["response_mask"])
    torch.testing.assert_close(left["log_probs"], right["log_probs"], atol=within, rtol=0)
