"""The ragged workload of throughput.py: when its model ends a response."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks import workload

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> workload.Workload:
    return workload.write(tmp_path_factory.mktemp("ragged"), "ragged")


@torch.no_grad()
def drawn(at: Path, prompt: str, tokens: int) -> Tensor:
    """Probabilities [tokens, V] of each token of a response that goes on with the likeliest but no end."""
    model, words = LlamaForCausalLM.from_pretrained(at), AutoTokenizer.from_pretrained(at)
    ids, before = words(prompt, return_tensors="pt")["input_ids"], None
    found = []
    for _ in range(tokens):
        said = model(ids, past_key_values=before, use_cache=True)
        found.append(said.logits[0, -1].softmax(-1))
        going_on = found[-1].clone()
        going_on[workload.END] = 0
        ids, before = going_on.argmax().view(1, 1), said.past_key_values
    return torch.stack(found)


def test_a_response_ends_from_its_eighth_token_on_with_the_same_probability(
    written: workload.Workload,
) -> None:
    for prompt in workload.read_prompts(written.prompts)[:3]:
        said = drawn(written.model, prompt, 24)
        ends = said[:, workload.END]
        assert ends[: workload.SHORTEST_RESPONSE - 1].max() < 1e-9
        later = ends[workload.SHORTEST_RESPONSE - 1 :]
        assert later.tolist() == pytest.approx([workload.END_PROBABILITY] * len(later), rel=0.1)
        assert said[:, workload.PAD].max() < 1e-6


def test_prompts_are_ragged(written: workload.Workload) -> None:
    lengths = {len(prompt.split()) for prompt in workload.read_prompts(written.prompts)}
    assert lengths == set(range(workload.SHORTEST_PROMPT, workload.PROMPT_TOKENS + 1))


def test_the_fixed_one_has_no_end(tmp_path: Path) -> None:
    found = workload.write(tmp_path)
    words = AutoTokenizer.from_pretrained(found.model)
    assert min(words.eos_token_id, words.pad_token_id) >= workload.config("fixed").vocab_size
    assert {len(prompt.split()) for prompt in workload.read_prompts(found.prompts)} == {64}
