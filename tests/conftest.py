"""Rules for every test: its folder marks it, it runs on one thread, and it leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import json
import os
import random
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.leaks import MARK, Look, Traces, restore, settled

if TYPE_CHECKING:
    from tests.unit.rlhf import Rlhf

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("unit", "ranks", "ray", "extras", "gpu", "packaging")

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"

# Set before torch, Ray or a tracker is imported; processes that tests start inherit them.
DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",  # devices have as many threads as cores, which would spin
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the process itself
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # set by Lightning, and by DeepSpeed, which saving a model imports
    MARK: uuid.uuid4().hex,
}


def pytest_configure(config: pytest.Config) -> None:
    """Make the machine quiet and small: no network, no usage statistics."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if hasattr(config, "workerinput"):  # one of several sessions of pytest-xdist, which share an environment
        os.environ[MARK] = DEFAULTS[MARK]
    gc.disable()  # until the modules are imported: its looks at all of them took a tenth of a session
    # Each of Lightning's trainers asks for the entry points of all packages that are installed.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)  # type: ignore[assignment]


def pytest_sessionfinish() -> None:
    """Remove wandb's directories, as it does when Python ends: pytest-xdist may kill a session before."""
    if "wandb" in sys.modules:
        from wandb import Artifact
        from wandb.sdk.data_types._private import MEDIA_TMP

        MEDIA_TMP.cleanup()
        Artifact._TMP_DIR.cleanup()


def pytest_collection_finish() -> None:
    """From here on the garbage collector looks at what tests make, not at modules."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and skip those that need a device that is not there."""
    for item in items:
        tier = item.path.relative_to(ROOT).parts[1] if item.path.is_relative_to(ROOT) else ""
        if tier in TIERS:
            item.add_marker(tier)
        if tier == "gpu" and not _has_gpu():
            reason = "needs a CUDA device: torch.cuda.is_available() is False"
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of tiny models: lm, tied, wide and scalar."""
    from tests.unit.engines import tiny  # a session that only hands tests to others needs no torch

    return tiny.write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test's own directory the present one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON Lines and return the file."""

    def write(*rows: object, name: str = "train.jsonl") -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return write


@pytest.fixture
def numbered(write_rows: Callable[..., Path]) -> Callable[[int], Path]:
    """Write n rows with the prompts p0, p1, ... and the responses r0, r1, ..."""
    return lambda count: write_rows(*({"prompt": f"p{i}", "response": f"r{i}"} for i in range(count)))


@pytest.fixture
def deterministic_as_before() -> Iterator[None]:
    """Put back what a deterministic run changes in this process."""
    import numpy as np
    import torch

    state, environment = random.getstate(), os.environ.get(CUBLAS)
    numbers, benchmark = np.random.get_state(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    random.setstate(state)
    np.random.set_state(numbers)
    os.environ.pop(CUBLAS, None)
    if environment is not None:
        os.environ[CUBLAS] = environment


def _leaves_nothing(*, files: Look) -> Iterator[None]:
    before = Traces.take(ROOT, files=files)
    yield
    words = settled(before, ROOT, files=files)
    restore(before.environment)
    new = [word for word in words if word not in _REPORTED]
    _REPORTED.update(new)
    if new:
        pytest.fail("left behind:\n  " + "\n  ".join(new), pytrace=False)


_REPORTED: set[str] = set()


def _freeze_what_was_imported() -> None:
    """Tests import what they need, and each collection of theirs would look at all of it."""
    if len(sys.modules) > _FROZEN.get("modules", 0) + 20:
        gc.collect()
        gc.freeze()
        _FROZEN["modules"] = len(sys.modules)


_FROZEN: dict[str, int] = {}


@pytest.fixture(scope="session", autouse=True)
def session_leaves_nothing() -> Iterator[None]:
    """Look at the whole session; at files only in CI, where nobody edits the repository meanwhile."""
    if torch := sys.modules.get("torch"):  # the tests at hand have imported it, or none of them needs it
        torch.set_num_threads(1)
    yield from _leaves_nothing(files="all" if os.environ.get("CI") else "none")


@pytest.fixture(scope="module", autouse=True)
def module_leaves_nothing(session_leaves_nothing: None) -> Iterator[None]:
    """Look at what the fixtures of a module leave."""
    _freeze_what_was_imported()
    yield from _leaves_nothing(files="none")


@pytest.fixture(autouse=True)
def test_leaves_nothing(module_leaves_nothing: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Look at one test; a unit test must not have started Ray either."""
    yield from _leaves_nothing(files="top")
    ray = sys.modules.get("ray")
    if ray is not None and request.node.get_closest_marker("unit") is not None and ray.is_initialized():
        ray.shutdown()
        pytest.fail("a unit test started Ray: move it to tests/ray, or let it run without", pytrace=False)


@pytest.fixture(scope="session")
def lightning_imported() -> None:
    """Import Lightning before a test captures: its log keeps the stream of then, and a test's is closed."""
    import lightning.pytorch  # noqa: F401


@pytest.fixture
def rlhf(
    lightning_imported: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Rlhf:
    """The `rlhf` command, in this process."""
    from tests.unit.rlhf import Rlhf  # here, since a session that only hands tests to others needs no torch

    return Rlhf(monkeypatch=monkeypatch, capfd=capfd)
