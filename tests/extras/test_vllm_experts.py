"""Mixtures of experts in vLLM, whose kernel on a CPU takes packed weights, through changes of weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoConfig

from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.engines.vllm.config import check_vllm
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.spec import ModelSpec, Sampling
from tests.extras import generating
from tests.extras.generating import EXACT, prompts, vllm_of
from tests.unit import spmd
from tests.unit.engines import three_d
from tests.unit.engines.decoders import agree, table

SEQUENCES = prompts([3, 9, 1, 12, 140])
DRAWN = Sampling(max_new_tokens=7, temperature=0.8)
CHANGES = 3
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Mixture:
    """A model: its type, and what its configuration says beside the sizes."""

    kind: str
    options: dict[str, Any]


MODELS = {
    "qwen3": Mixture("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 64, "norm_topk_prob": True}),
    "padded": Mixture("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 40, "mlp_only_layers": [0]}),
    "qwen2": Mixture(
        "qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    ),
    "olmoe": Mixture("olmoe", {"num_experts": 4}),
    "granite": Mixture(
        "granitemoe",
        {
            "num_local_experts": 4,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
}
"""Widths of 64 are whole tiles of the kernel, also when they are halved, and 40 are not."""


def written(directory: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    model = MODELS[name]
    sizes = {**generating._SIZES, "head_dim": 32, "num_experts_per_tok": 2}
    monkeypatch.setitem(
        generating.MODELS, name, AutoConfig.for_model(model.kind, **{**sizes, **model.options})
    )
    check_vllm(generating.MODELS[name], ParallelLayout(), on_cpu=True)
    return generating.write(directory, name)


def answered(spec: ModelSpec, directory: Path) -> list[TensorDict]:
    """What one rank says after each change of weights, with the log-probabilities that transformers finds."""
    source = FSDPEngine(spec)
    engine = vllm_of(source, spec, end=[5])
    answers = list[TensorDict]()
    for change in range(CHANGES):
        answers.append(engine.generate(table(SEQUENCES), sampling=DRAWN, seed=3))
        model = generating.exported(source, directory / str(change))
        expected = generating.judged(model, SEQUENCES, answers[-1], DRAWN)
        torch.testing.assert_close(answers[-1]["log_probs"], expected, atol=EXACT, rtol=0)
        generating.learn(source, prompts([5, 3]))
    engine.close()
    return answers


@pytest.mark.parametrize("name", MODELS)
def test_experts_follow_every_change_of_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *later = answered(written(tmp_path / "model", name, monkeypatch), tmp_path)
    assert not any(torch.equal(answers["response_ids"], first["response_ids"]) for answers in later)


def said(group: dist.ProcessGroup, spec: ModelSpec) -> list[TensorDict]:
    """What one of two ranks of a copy says after each change of weights."""
    seat = three_d.seat(group, ParallelLayout(t=2))
    source = FSDPEngine(spec)  # of each rank its own, as FSDP does not divide experts: both learn the same
    engine = vllm_of(source, spec, seat=seat, end=[5])
    answers = list[TensorDict]()
    for _ in range(CHANGES):
        answers.append(engine.generate(table(SEQUENCES), sampling=DRAWN, seed=3))
        generating.learn(source, prompts([5, 3]))
    return answers


def test_two_ranks_of_a_copy_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = written(tmp_path / "model", "qwen3", monkeypatch)
    expected = answered(spec, tmp_path)
    for answers in spmd.run_within(TIMEOUT_S, 2, lambda group: said(group, spec)):
        for one, other in zip(answers, expected, strict=True):
            agree(one, other, within=EXACT)
