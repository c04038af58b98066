"""The workload that every trainer of `throughput.py` runs: one model, one set of prompts, one rule reward.

There are two. `fixed` has prompts of PROMPT_TOKENS and, for want of an end token, responses of
RESPONSE_TOKENS. `ragged` has prompts of SHORTEST_PROMPT to PROMPT_TOKENS and a model that itself ends a
response after SHORTEST_RESPONSE tokens at the earliest (see `_end_at_random`), so that no trainer needs an
option for it; at RESPONSE_TOKENS every trainer stops.
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

VOCABULARY = 4096
PROMPT_TOKENS = 64
RESPONSE_TOKENS = 128
SHORTEST_PROMPT = 16
SHORTEST_RESPONSE = 8
END_PROBABILITY = 1 / 60
"""Of each token of a ragged response from the eighth on."""
SEQUENCES = 64
SAMPLES_PER_PROMPT = 8
LEARNING_RATE = 1e-6
KL = 0.05
"""Weight of the divergence in rewards, TRL's default of PPO; GRPO has none there, and no reference."""

Lengths = Literal["fixed", "ragged"]
PAD, END = VOCABULARY - 2, VOCABULARY - 1
"""Tokens of the ragged workload; no prompt has them."""
_STAGE_WORDS = 32
"""Words of each stage on the way to where a ragged response may end."""
_MARK, _CERTAIN = 16.0, 20.0
"""In the embedding, of the stage that a word is in; the logit of a word of the next stage."""
_QUIET = 0.1
"""Factor of what layers add to the other channels, beside which a mark is to outweigh all else."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Where the model and the prompts of one benchmark lie.

    Example: `Workload(model=Path("results/workload/model"), prompts=Path("results/workload/prompts.jsonl"))`.
    """

    model: Path
    """Hugging Face directory: Llama of hidden 256 x 4 layers, fp32, with a word-level tokenizer."""

    prompts: Path
    """JSONL, one {"prompt": str} a line."""

    @classmethod
    def under(cls, directory: Path) -> "Workload":
        """The workload that `write(directory)` writes."""
        return cls(model=directory / "model", prompts=directory / "prompts.jsonl")


def samples_per_prompt(algo: str) -> int:
    """Responses to each prompt of an iteration, which has SEQUENCES responses."""
    return SAMPLES_PER_PROMPT if algo == "grpo" else 1


def write(directory: Path, lengths: Lengths = "fixed") -> Workload:
    """Write the model, its tokenizer and the prompts under `directory`; the same bytes every time."""
    workload = Workload.under(directory)
    ragged = lengths == "ragged"
    set_seed(0)
    model = LlamaForCausalLM(config(lengths))
    if ragged:
        _end_at_random(model)
    model.save_pretrained(workload.model)
    _save_tokenizer(workload.model, ragged=ragged)
    draw = random.Random(0)  # noqa: S311  (prompts, not secrets)
    rows = ({"prompt": _prompt(draw, ragged=ragged)} for _ in range(512))
    workload.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return workload


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file that `write` wrote."""
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def reward(responses: list[str]) -> list[float]:
    """Share of the words of a response that have an even number, in [0, 1]."""
    return [_share_of_even(response.split()) for response in responses]


def _share_of_even(words: list[str]) -> float:
    return sum(word[-1] in "02468" for word in words) / max(len(words), 1)


def _word(index: int) -> str:
    return f"w{index}"


def _prompt(draw: random.Random, *, ragged: bool) -> str:
    """Random words; the last of a ragged one is of the first stage."""
    if not ragged:
        return " ".join(_word(draw.randrange(VOCABULARY)) for _ in range(PROMPT_TOKENS))
    length = draw.randint(SHORTEST_PROMPT, PROMPT_TOKENS)
    ids = [draw.randrange(PAD) for _ in range(length - 1)]
    return " ".join(map(_word, (*ids, draw.randrange(_STAGE_WORDS))))


def config(lengths: Lengths) -> LlamaConfig:
    """Of the model; the fixed one has no end token, so that every response has RESPONSE_TOKENS tokens."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=END if lengths == "ragged" else None,
        pad_token_id=PAD if lengths == "ragged" else None,
        dtype="float32",
    )


@torch.no_grad()
def _end_at_random(model: LlamaForCausalLM) -> None:
    """Let the model end a response with END_PROBABILITY from its SHORTEST_RESPONSE-th token on, never before.

    One channel of the hidden state a stage says which stage the last token is in; nothing else writes to
    these channels. After a word of stage k comes one of stage k + 1; the last stage, to which most words
    belong, stays, and may end. A prompt's last word is of stage 0.
    """
    stages = SHORTEST_RESPONSE
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    stage = (torch.arange(VOCABULARY) // _STAGE_WORDS).clamp(max=stages - 1)
    embedding[:, :stages] = _MARK * torch.nn.functional.one_hot(stage, stages)
    for layer in model.model.layers:
        for writing in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            writing.mul_(_QUIET)
            writing[:stages] = 0.0
    seen = math.sqrt(model.config.hidden_size)  # what the final norm makes of a mark that outweighs all else
    head[:, :stages] = 0.0
    for this in range(stages - 1):
        head[stage == this + 1, this] = _CERTAIN / seen
    logit = math.log(VOCABULARY) + math.log(END_PROBABILITY / (1 - END_PROBABILITY))
    head[END], head[PAD] = 0.0, 0.0
    head[END, stages - 1] = logit / seen
    head[END, : stages - 1] = head[PAD, :stages] = -2 * _CERTAIN / seen


def _save_tokenizer(directory: Path, *, ragged: bool) -> None:
    """One word a token; a fixed workload's padding and end lie past the model's vocabulary: none is drawn."""
    pad, end = (PAD, END) if ragged else (VOCABULARY, VOCABULARY + 1)
    vocabulary = {_word(index): index for index in range(min(pad, VOCABULARY))}
    vocabulary |= {"<pad>": pad, "<eos>": end}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106  (no password)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")  # noqa: S106
    whole.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    # A name that transformers 4 knows, too.
    named = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(named, indent=2))
