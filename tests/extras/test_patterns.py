"""Patterns that need the extras, on Ray: vLLM as a generator of its own, and ZeRO over two devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.callbacks import Trace
from rlhf_lightning.parallel import Moved
from rlhf_lightning.strategies import DeepSpeedChat, Local, OpenRLHF, Pipelined
from rlhf_lightning.workers import Settings
from tests.extras.generating import SMALL
from tests.extras.test_engine_pairs import STEPS, ppo
from tests.extras.test_vllm_fit import write_model
from tests.ray.model import Parameters, fit, furthest


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(path: str, tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    """What one device learns with the native engines."""
    return fit(ppo(path), Local(), tmp_path_factory.mktemp("local"), steps=STEPS)


@pytest.mark.parametrize("parts", [1, 3])
def test_vllm_answers_on_devices_of_its_own(
    path: str, expected: Parameters, parts: int, tmp_path: Path
) -> None:
    trace, settings = Trace(str(tmp_path / "trace.json")), Settings(generator="vllm", vllm=SMALL)
    if parts > 1:
        strategy: OpenRLHF = Pipelined(parts=parts, generator_devices=2, settings=settings)
    else:
        strategy = OpenRLHF(generator_devices=2, settings=settings)
    learned = fit(ppo(path), strategy, tmp_path, steps=STEPS, callbacks=[trace])
    assert furthest(expected, learned) < 1e-4
    answering = [call for call in trace.calls if call.method == "next_sequences"]
    assert len(answering) == (2 * parts * STEPS if parts > 1 else 0)
    sent = [call.value for call in trace.calls if call.method == "send_weights"]
    assert len(sent) == 1 + STEPS  # before the first answers, and as soon as each step has learned
    for moved in sent:
        assert isinstance(moved, Moved)
        assert moved.sent_bytes == 2 * sum(tensor.nbytes for tensor in learned.values())


def test_zero_over_two_devices_learns_as_on_one(path: str, expected: Parameters, tmp_path: Path) -> None:
    assert furthest(expected, fit(ppo(path), DeepSpeedChat(devices=2), tmp_path, steps=STEPS)) < 1e-4
