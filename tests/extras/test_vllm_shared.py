"""vLLM in the memory of the actor that Megatron trains: nothing is there twice, and only what lacks moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from rlhf_lightning.engines import VLLM
from rlhf_lightning.engines.megatron.engine import MegatronEngine
from rlhf_lightning.functional import PolicyLoss
from rlhf_lightning.functional.aggregate import Counts
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.parallel.reshard import reshard
from rlhf_lightning.parallel.weights import Weights
from rlhf_lightning.spec import ModelSpec, Sampling
from tests.extras import generating
from tests.extras.generating import SMALL, prompts, vllm_of
from tests.unit import spmd
from tests.unit.engines import three_d
from tests.unit.engines.decoders import table

STEPS, TIMEOUT_S = 20, 200.0
GENERATIONS = (0, 1, STEPS)
"""Updates before which it generates."""
CLOSE = 1e-5
"""Largest difference of log-probabilities of vLLM and the trainer, which add in another order."""
SEQUENCES = prompts([3, 9, 1, 12, 140])
DRAWN = Sampling(max_new_tokens=7, temperature=0.8)


@dataclass(frozen=True)
class Told:
    """What one rank found."""

    apart: list[float]
    """Largest difference of log-probabilities in each generation, on ranks that have the output."""
    responses: list[TensorDict]
    """Before the first update and after the last."""
    shared: bool
    """Whether vLLM's parameters and the training ones lay in the same storages while it generated."""
    received_bytes: list[int]
    """Of each transition."""
    planned_bytes: int
    held_bytes: int
    """Memory of all parameters, of vLLM and of the trainer, while it generated."""
    shard_bytes: int
    """Of the generation shard."""
    left_bytes: int
    """Memory of vLLM's parameters after generation."""
    tensor: list[int]
    """Ranks that had its copy."""


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Where the memory of tensors begins, and its bytes."""
    return {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}


def ppo_step(engine: MegatronEngine, rows: TensorDict) -> None:
    """One update of PPO's actor on all rows, with advantages that differ by row."""
    rows["advantages"] = torch.linspace(-1, 1, len(rows))[:, None] * rows["response_mask"]
    counts = Counts.of(rows["response_mask"])
    engine.accumulate(rows, PolicyLoss(), counts, temperature=DRAWN.temperature)
    engine.optimizer_step()


def told(group: dist.ProcessGroup, spec: ModelSpec, layout: ParallelLayout, config: VLLM) -> Told:
    seat = three_d.seat(group, layout)
    source = MegatronEngine(spec, seat=seat)
    engine = vllm_of(source, spec, config, seat=seat, end=[5])
    ours, theirs = list(source.shards.values()), list(engine._model.parameters())
    seen: list[tuple[dict[int, int], dict[int, int]]] = []
    step = engine._engine.step

    def watched() -> object:
        seen.append((storages([p.data for p in ours]), storages([p.data for p in theirs])))
        return step()

    engine._engine.step = watched
    apart, received, responses = [], [], []
    for number in range(STEPS + 1):
        if number in GENERATIONS:
            answers = engine.generate(table(SEQUENCES), sampling=DRAWN, seed=3)
            rows = TensorDict({**table(SEQUENCES), **answers}, batch_size=len(SEQUENCES))
            received.append(source.transition().received_bytes)
            right = source.infer(rows, temperature=DRAWN.temperature)["log_probs"]
            if seat.gives_output:
                apart.append(float((right - answers["log_probs"]).abs().max()))
            responses.append(answers)
        ppo_step(source, rows)
    training, vllm = seen[-1]
    weights = Weights(tuple(source.conversion.parameters), source.stages, element_bytes=4)
    return Told(
        apart,
        [responses[0], responses[-1]],
        training.keys() <= vllm.keys(),
        received,
        int(reshard(weights, layout).ranks[seat.rank].received_bytes),
        sum((training | vllm).values()),
        source.transition().generation_bytes,
        sum(storages([p.data for p in theirs]).values()),
        engine._groups.ranks,
    )


SIZES = {**generating._SIZES, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
}
CASES = [
    ("llama", ParallelLayout()),
    ("qwen2", ParallelLayout(t=2)),
    ("llama", ParallelLayout(t=2, generation=Generation(t=1))),
    ("llama", ParallelLayout(p=2, generation=Generation())),
    ("llama", ParallelLayout(t=4)),
    ("qwen2", ParallelLayout(t=4, generation=Generation(t=2))),
]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=["t1", "t2", "t2-tg1", "p2-pg1", "t4", "t4-tg2"])
def test_the_actor_is_there_once(
    name: str, layout: ParallelLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(generating.MODELS, name, MODELS[name])
    config = replace(SMALL, sleep=layout.t == 4)  # awake it also has to forget keys and values by itself
    spec = generating.write(tmp_path, name)
    spec = replace(spec, optimizer=replace(spec.optimizer, lr=1e-3))
    ranks = spmd.run_within(TIMEOUT_S, layout.num_ranks, lambda group: told(group, spec, layout, config))
    for rank, one in enumerate(ranks):
        assert all(apart < CLOSE for apart in one.apart), one.apart
        assert one.shared
        assert one.received_bytes == [one.planned_bytes] * len(GENERATIONS)
        assert (one.planned_bytes == 0) == (layout.generating.num_micro == 1)
        assert one.held_bytes == one.shard_bytes
        assert one.left_bytes == 0
        assert one.tensor == next(ranks for ranks in layout.generating.groups("t") if rank in ranks)
        for other in one.tensor:
            assert torch.equal(ranks[other].responses[1]["response_ids"], one.responses[1]["response_ids"])
        assert not torch.equal(one.responses[0]["response_ids"], one.responses[1]["response_ids"])
    assert any(one.apart for one in ranks)
