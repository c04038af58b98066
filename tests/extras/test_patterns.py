"""What needs the extras, on Ray: vLLM as a generator of its own, also killed, and ZeRO over two devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_lightning.callbacks import Trace
from rlhf_lightning.parallel import Moved
from rlhf_lightning.strategies import DeepSpeedChat, Local, OneStepOff, OpenRLHF, Pipelined
from rlhf_lightning.workers import Settings
from tests.extras.generating import SMALL
from tests.extras.test_engine_pairs import STEPS, ppo
from tests.extras.test_vllm_fit import write_model
from tests.ray import carried
from tests.ray.cluster import started
from tests.ray.held import SOON_S, assert_one_message, itself, killed_within, write_held
from tests.ray.model import Parameters, fit, furthest

IMPORTED = ("transformers.models.llama.modeling_llama", "lightning.pytorch")
ON_RAY = (
    "rlhf_lightning.engines.vllm.engine",
    "rlhf_lightning.engines.deepspeed.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""VLLM imports Ray."""


@pytest.fixture(scope="module", autouse=True)
def cluster(module_leaves_nothing: None) -> Iterator[None]:
    """One for all tests of this module."""
    with started(6, imported=IMPORTED, on_ray=ON_RAY):
        yield


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


def test_answers_are_gone_on_with_by_the_next_weights(path: str, tmp_path: Path) -> None:
    """Partial rollouts: paused, and gone on with."""
    algorithm = carried.watched(path, tmp_path)
    settings = Settings(generator="vllm", vllm=SMALL)
    metrics = carried.run(algorithm, OneStepOff(max_staleness=2, settings=settings), steps=6)
    carried.check(algorithm.batches, metrics, 2)
    carried.check_log_probs(algorithm)


@pytest.mark.timeout(300)
def test_a_killed_device_ends_the_run(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_held(tmp_path, Path(path), "answering")
    options = (
        "--strategy openrlhf --strategy.settings.generator vllm --strategy.settings.vllm.kv_cache_gib 0.02"
    )
    killed_within(SOON_S, config, options, victim=itself)
    name = r"generator\[rank 0, device 1\]\.generate_sequences"
    assert_one_message(capsys.readouterr().err, name)
