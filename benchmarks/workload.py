"""The workload that every trainer of `throughput.py` runs: one model, one set of prompts, one rule reward.

Legend: P is the prompt width, R the response width, B the sequences of one iteration.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

VOCABULARY = 4096
PROMPT_TOKENS = 64
RESPONSE_TOKENS = 128
SEQUENCES = 64
SAMPLES_PER_PROMPT = 8
LEARNING_RATE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Where the model and the prompts of one benchmark lie.

    Example: `Workload(model=Path("results/workload/model"), prompts=Path("results/workload/prompts.jsonl"))`.
    """

    model: Path
    """Hugging Face directory: Llama of hidden 256 x 4 layers, fp32, with a word-level tokenizer."""

    prompts: Path
    """JSONL, one {"prompt": str} a line; every prompt is PROMPT_TOKENS tokens long."""

    @classmethod
    def under(cls, directory: Path) -> "Workload":
        """The workload that `write(directory)` writes."""
        return cls(model=directory / "model", prompts=directory / "prompts.jsonl")


def tokens_per_iteration() -> int:
    """Prompt and response tokens of the global batch of one iteration."""
    return SEQUENCES * (PROMPT_TOKENS + RESPONSE_TOKENS)


def write(directory: Path) -> Workload:
    """Write the model, its tokenizer and the prompts under `directory`; the same bytes every time."""
    workload = Workload.under(directory)
    set_seed(0)
    model = LlamaForCausalLM(_config())
    model.save_pretrained(workload.model)
    _tokenizer().save_pretrained(workload.model)
    words = random.Random(0)  # noqa: S311  (prompts, not secrets)
    rows = (
        {"prompt": " ".join(_word(words.randrange(VOCABULARY)) for _ in range(PROMPT_TOKENS))}
        for _ in range(512)
    )
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


def _config() -> LlamaConfig:
    """The model, without an end-of-sequence token, so that every response has RESPONSE_TOKENS tokens."""
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
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """One word a token; padding and end lie past the model's vocabulary, so no model can sample them."""
    vocabulary = {_word(index): index for index in range(VOCABULARY)}
    vocabulary |= {"<pad>": VOCABULARY, "<eos>": VOCABULARY + 1}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106  (no password)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")  # noqa: S106
