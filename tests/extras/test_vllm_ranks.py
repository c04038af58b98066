"""vLLM on several ranks: its tensor groups are the layout's, and every engine and layout feeds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from transformers import AutoModelForCausalLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rlhf_lightning.engines import FSDP, VLLM, FSDPEngine, TrainEngine, train_engine
from rlhf_lightning.engines.megatron.engine import MegatronEngine
from rlhf_lightning.engines.vllm.engine import VLLMEngine
from rlhf_lightning.engines.vllm.executor import InPlaceExecutor
from rlhf_lightning.engines.vllm.groups import Groups
from rlhf_lightning.parallel import Generation, ParallelLayout, Seat
from rlhf_lightning.spec import ModelSpec, Sampling
from tests.extras import generating
from tests.extras.generating import EXACT, SMALL, prompts, vllm_of
from tests.unit import spmd
from tests.unit.engines import three_d
from tests.unit.engines.decoders import agree, table

LENGTHS = [3, 9, 1, 12, 140]
DRAWN = Sampling(max_new_tokens=7, temperature=0.8, top_p=0.95)
TIMEOUT_S = 120.0
PAIRS = [[0, 1]] * 2 + [[2, 3]] * 2
COPYING = replace(SMALL, zero_copy=False)


@dataclass(frozen=True)
class Case:
    """Who trains, and how vLLM generates with it."""

    kind: Literal["fsdp", "megatron"]
    name: str
    layout: ParallelLayout
    config: VLLM
    tensor: list[list[int]]
    """For each rank those that generate with its copy."""


@dataclass(frozen=True)
class Said:
    """What one rank said and was given."""

    answers: list[dict[str, TensorDict]]
    """See `answers`; before and after an optimizer step."""
    tensor: list[int]
    """Ranks that had its copy."""
    largest: int
    """Numbers in the largest tensor that the training engine gave at once."""
    vllm: int
    """Numbers in vLLM's parameters."""


def answers(engine: VLLMEngine) -> dict[str, TensorDict]:
    """Answers in one go, those that texts end, and those that pause after three tokens, and at their end."""
    rows, pauses = table(prompts(LENGTHS)), iter([False] * 3 + [True] + [False] * DRAWN.max_new_tokens)
    whole = engine.generate(rows, sampling=DRAWN, seed=3)
    texts = tuple(str(generating.TOKENIZER.decode(whole["response_ids"][row, 3])) for row in (1, 4))
    ended = engine.generate(rows, sampling=replace(DRAWN, stop_strings=texts), seed=3)
    paused = engine.resume(rows, sampling=DRAWN, seed=3, pause=lambda _: next(pauses))
    begun = TensorDict({**rows, **paused}, batch_size=len(rows))
    resumed = engine.resume(begun, sampling=DRAWN, seed=3, pause=lambda _: next(pauses))
    return {"whole": whole, "ended": ended, "paused": paused, "resumed": resumed}


def said(group: dist.ProcessGroup, case: Case, spec: ModelSpec) -> Said:
    source: TrainEngine
    if case.layout.d > 1:
        seat = Seat(group.rank(), case.layout, torch.device("cpu"), group, None)
        source = FSDPEngine(spec, group=group)
    elif case.kind == "fsdp":
        seat = three_d.seat(group, case.layout)
        source = train_engine(spec, head="lm", seat=seat, config=FSDP())
    else:
        seat = three_d.seat(group, case.layout)
        source = MegatronEngine(spec, seat=seat)
    engine = vllm_of(source, spec, case.config, seat=seat, end=[5])
    for one in engine._groups._coordinators:
        for theirs in (one.cpu_group, one.device_group):
            assert dist.get_process_group_ranks(theirs) == one.ranks
    found = [answers(engine)]
    generating.learn(source, prompts([5, 3]))
    found.append(answers(engine))
    largest = max(weight.numel() for _, weight in source.weights())
    held = sum(parameter.numel() for parameter in engine._model.parameters())
    return Said(found, engine._groups.ranks, largest, held)


def expected(spec: ModelSpec, directory: Path) -> tuple[list[dict[str, TensorDict]], Tensor]:
    """Answers of one rank, and log-probabilities of the model after the step."""
    source = FSDPEngine(spec)
    engine = vllm_of(source, spec, end=[5])
    found = [answers(engine)]
    generating.learn(source, prompts([5, 3]))
    found.append(answers(engine))
    model = generating.exported(source, directory)
    engine.close()
    for one in found:
        lengths = {name: part["response_mask"].sum(1) for name, part in one.items()}
        assert lengths["paused"].max() == 3
        assert lengths["ended"].sum() < lengths["whole"].sum()
        agree(one["resumed"], one["whole"])
    return found, generating.judged(model, prompts(LENGTHS), found[1]["whole"], DRAWN)


CASES = [
    Case("fsdp", "llama", ParallelLayout(d=2), SMALL, [[0], [1]]),
    Case("fsdp", "qwen2", ParallelLayout(t=2, generation=Generation()), SMALL, [[0], [1]]),
    Case("megatron", "qwen2", ParallelLayout(t=4), SMALL, [[0, 1, 2, 3]] * 4),
    Case("megatron", "llama", ParallelLayout(p=2, t=2, generation=Generation(t=2)), COPYING, PAIRS),
]
"""Four ranks that share two key-value heads have nothing to lend, so there weights are copied, too."""


@pytest.mark.parametrize("case", CASES, ids=["fsdp", "fsdp-t2", "t4", "p2t2-tg2"])
def test_ranks_answer_as_one(case: Case, tmp_path: Path) -> None:
    spec = generating.write(tmp_path / "model", case.name)
    (before, after), log_probs = expected(spec, tmp_path / "after")
    torch.testing.assert_close(after["whole"]["log_probs"], log_probs, atol=EXACT, rtol=0)
    assert not torch.equal(before["whole"]["response_ids"], after["whole"]["response_ids"])
    ranks = spmd.run_within(TIMEOUT_S, case.layout.num_ranks, lambda group: said(group, case, spec))
    model = AutoModelForCausalLM.from_config(generating.MODELS[case.name])
    whole = sum(parameter.numel() for parameter in model.parameters())
    for rank, one in enumerate(ranks):
        for name in before:
            agree(one.answers[0][name], before[name])
            agree(one.answers[1][name], after[name], within=EXACT)  # two engines have learned: they round
        assert one.tensor == case.tensor[rank]
        assert one.largest == 128 * 128 < whole / 4
        assert whole <= one.vllm * len(one.tensor) < whole * 1.2 + 4096 * len(one.tensor)


def added_by_name(group: dist.ProcessGroup) -> list[float]:
    """Ones added over a copy's ranks, as the compiled model of an earlier engine asks for it."""
    cpu, found = torch.device("cpu"), list[float]()
    earlier = Groups(group, device=cpu)
    name = earlier._found["_TP"].unique_name  # type: ignore[attr-defined]
    earlier.close()
    del earlier
    here, other = Groups(group, device=cpu), Groups(None, device=cpu)
    for _ in range(2):
        with here.entered():
            found.append(float(torch.ops.vllm.all_reduce(torch.ones(()), group_name=name)))
        with other.entered():
            pass
    return found


def test_a_later_engine_has_the_groups_that_a_compiled_model_names() -> None:
    """VLLM keeps compiled models on disk for other runs, in which engines may be made in another order."""
    assert spmd.run(2, added_by_name) == [[2.0, 2.0]] * 2


def fewest_bytes(group: dist.ProcessGroup) -> list[int]:
    """What a rank may take for keys and values, where one finds more room than the other."""
    executor, here = object.__new__(InPlaceExecutor), Groups(group, device=torch.device("cpu"))
    room = [9 - group.rank()]
    with here.entered(), mock.patch.object(UniProcExecutor, "determine_available_memory", return_value=room):
        return executor.determine_available_memory()


def test_the_ranks_of_a_copy_have_equally_many_keys_and_values() -> None:
    """They schedule alike by themselves; on a GPU each asks how much is free on its own."""
    assert spmd.run(2, fewest_bytes) == [[8]] * 2


def ends_late(group: dist.ProcessGroup) -> list[bool]:
    """Whether a world outlives groups of one before it: those that had made that one, and others there."""
    dist.destroy_process_group(group)
    maker, guest = (Groups(None, device=torch.device("cpu")) for _ in range(2))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    kept = list[bool]()
    for earlier in (guest, maker):
        earlier.close()
        kept.append(dist.is_initialized())
    return kept


def test_an_engine_that_ends_in_the_next_run_leaves_that_runs_world() -> None:
    """A run under `local` ends vLLM's world, and its engine may be in a cycle that is collected later."""
    assert spmd.run(1, ends_late) == [[True, True]]
