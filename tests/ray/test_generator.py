"""A generator on devices of its own: what is learned stays the same, and it is sent each weight once."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from rlhf_lightning.algos import PPO, SFT
from rlhf_lightning.callbacks import Trace
from rlhf_lightning.data import TaskData
from rlhf_lightning.parallel import Moved
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Colocated, OneStepOff, OpenRLHF, Pipelined
from rlhf_lightning.workers import Actor, Settings
from tests.ray.model import ROWS, STEPS, Parameters, fit, furthest, ppo
from tests.unit.algos.short import trainer

STRATEGIES: Mapping[str, Callable[[], OpenRLHF]] = {
    "one each": OpenRLHF,
    "two that generate": lambda: OpenRLHF(generator_devices=2),
    "megatron": lambda: OpenRLHF(settings=Settings(engine="megatron")),
}


class Staleness(Callback):
    """Notes how old the weights behind each iteration's answers were."""

    def __init__(self) -> None:
        self.staleness: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.staleness.append(float(trainer.callback_metrics["response/staleness"]))


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_learns_the_same_with_a_copy_that_is_sent_each_weight_once(
    alone: tuple[PPO, Parameters], name: str, tiny: Path, tmp_path: Path
) -> None:
    algorithm, again = ppo(tiny), name == "one each"
    strategy, trace = STRATEGIES[name](), Trace(str(tmp_path / "trace.json"))
    algorithm.actor = replace(algorithm.actor, recompute_log_probs=again)
    learned = fit(algorithm, strategy, tmp_path, steps=STEPS, callbacks=[trace])
    assert furthest(alone[1], learned) < (1e-4 if name == "megatron" else 1e-5)
    receivers = strategy.generator_devices or 1
    made = [call.role for call in trace.calls if call.method == "generate_sequences"]
    assert made == ["generator"] * receivers * STEPS
    made = [call.role for call in trace.calls if call.method == "read_log_prob"]
    assert made == ["actor"] * again * STEPS, "by the actor, where they are to be computed again"
    sent = [call.value for call in trace.calls if call.method == "send_weights"]
    assert len(sent) == 1 + STEPS  # before the first answers, and as soon as each step has learned
    for moved in sent:
        assert isinstance(moved, Moved)
        assert moved.sent_bytes == receivers * sum(tensor.nbytes for tensor in learned.values())
    written = [event["name"] for event in json.loads(trace.path.read_text())["traceEvents"]]
    assert written.count("generator.receive_weights") == receivers * (1 + STEPS)


def test_an_actor_without_a_copy_answers_itself(tiny: Path, tmp_path: Path) -> None:
    """One that learns from given answers, on all devices on which it learns."""
    algorithm = SFT(actor=Actor(path=str(tiny), sampling=Sampling(max_new_tokens=6)))
    data = TaskData(batch_size=3, num_rows=3, num_val_rows=6, completions=True)
    found = trainer(OpenRLHF(devices=3), tmp_path).predict(algorithm, datamodule=data)
    batches = cast("list[dict[str, list[str]]]", found)
    assert [len(batch["responses"]) for batch in batches] == [3, 3]


def test_one_step_off_answers_the_next_batch_while_it_learns(
    alone: tuple[PPO, Parameters], tiny: Path, tmp_path: Path
) -> None:
    trace, seen = Trace(str(tmp_path / "trace.json")), Staleness()
    algorithm = ppo(tiny)
    learned = fit(algorithm, OneStepOff(), tmp_path, steps=STEPS, callbacks=[trace, seen])
    assert 1e-5 < furthest(alone[1], learned) < 1e-2
    assert seen.staleness == [0.0, 1.0, 1.0]
    for start, seconds in trace.iterations[1:]:
        inside = [call for call in trace.calls if start <= call.started_s <= start + seconds]
        (answering,) = [call for call in inside if call.method == "generate_sequences"]
        learning = [call.started_s for call in inside if call.method == "compute_values"]
        assert min(learning) < answering.started_s + answering.seconds


def uneven(tiny: Path) -> PPO:
    """PPO whose answers have 1 to 40 tokens, and whose actor scores them too."""
    algorithm = ppo(tiny)
    sampling = Sampling(max_new_tokens=40, stop_token_ids=tuple(range(10)))
    algorithm.actor = replace(algorithm.actor, sampling=sampling, recompute_log_probs=True)
    return algorithm


@pytest.fixture(scope="module")
def uneven_alone(cluster: str, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    """What one device learns from such answers."""
    return fit(uneven(tiny), Colocated(devices=1), tmp_path_factory.mktemp("uneven"), steps=STEPS)


def test_answers_are_scored_while_longer_ones_are_drawn(
    uneven_alone: Parameters, tiny: Path, tmp_path: Path
) -> None:
    """The first of three parts is scored before the last is there, and what is learned stays the same."""
    trace = Trace(str(tmp_path / "trace.json"))
    strategy = Pipelined(parts=3, generator_devices=2)
    learned = fit(uneven(tiny), strategy, tmp_path, steps=STEPS, callbacks=[trace])
    assert furthest(uneven_alone, learned) < 1e-5
    overlaps: defaultdict[str, list[float]] = defaultdict(list)
    for start, seconds in trace.iterations:
        inside = [call for call in trace.calls if start <= call.started_s <= start + seconds]
        drawn = [call for call in inside if call.method == "next_sequences"]
        assert len(drawn) == 3 * 2
        assert sum(call.num_rows for call in drawn) == ROWS
        first, last = min(c.started_s for c in drawn), max(c.started_s + c.seconds for c in drawn)
        for method in ("compute_values", "compute_ref_log_prob", "compute_reward", "read_log_prob"):
            scored = [call for call in inside if call.method == method]
            assert len(scored) == 3
            assert sum(call.num_rows for call in scored) == ROWS
            overlaps[method].append((last - min(call.started_s for call in scored)) / (last - first))
    # On a busy machine a scorer may come late once.
    assert all(max(shares) > 0.3 for shares in overlaps.values()), overlaps
