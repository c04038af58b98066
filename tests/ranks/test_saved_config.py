"""Where the configuration of a run is written, and what it is not written over."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlhf_lightning.cli  # noqa: F401 - here, since Lightning's log keeps the stderr that it is imported with
from tests.unit.rlhf import Rlhf

MINE = """# mine
algo: {class_path: ppo, init_args: {actor: {sampling: {max_new_tokens: 2}}}}
data: {class_path: taskdata, init_args: {num_rows: 8, num_val_rows: 2, batch_size: 2}}
strategy: local
trainer: {logger: false, max_steps: 1, limit_val_batches: 0, enable_checkpointing: false}
"""
SERVICE = """
from lightning.pytorch.loggers.logger import DummyLogger

class Service(DummyLogger):
    save_dir = "."
"""
"""A logger that keeps its files in the present directory, as wandb's does."""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration and a logger of the user's own in the present directory."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(MINE, encoding="utf-8")
    Path("service.py").write_text(SERVICE, encoding="utf-8")


@pytest.mark.parametrize("root", ["runs", "."])
def test_a_configuration_is_not_written_over(rlhf: Rlhf, root: str) -> None:
    logger = ("--trainer.logger", "service.Service", "--trainer.default_root_dir", root)
    rlhf.succeeds("fit", "--config=config.yaml", *logger, "--algo.gamma", "0.5")
    assert Path("config.yaml").read_text() == MINE
    written = Path(root, "config.yaml" if root == "runs" else "config-v1.yaml")
    assert "gamma: 0.5" in written.read_text()


def test_a_refused_run_leaves_the_configuration_of_the_one_before(rlhf: Rlhf) -> None:
    words = ("fit", "-c", "config.yaml", "--algo.gamma", "0.5")
    assert rlhf.run(*words)[0] == 0
    assert "no function scores" in rlhf.refused("fit", "-c", "config.yaml", "--algo.reward.functions", "[]")
    assert "gamma: 0.5" in Path("runs/config.yaml").read_text()
    csv = ("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "logs")
    assert rlhf.run(*words, *csv)[0] == 0
    assert "gamma: 0.5" in Path("logs/lightning_logs/version_0/config.yaml").read_text()


@pytest.mark.parametrize("root", ["runs", "."])
def test_options_from_a_file_of_their_own_are_written_with_the_others(rlhf: Rlhf, root: str) -> None:
    """Written to a file beside it they would lie over the user's, or be looked for where that is."""
    given = "{logger: false, max_steps: 3, limit_val_batches: 0, enable_checkpointing: false}"
    Path("trainer.yaml").write_text(given, encoding="utf-8")
    options = ("--trainer.max_steps", "2", "--trainer.default_root_dir", root)
    rlhf.succeeds("fit", "--config=config.yaml", "--trainer", "trainer.yaml", *options)
    assert Path("trainer.yaml").read_text() == given
    written = Path(root, "config.yaml" if root == "runs" else "config-v1.yaml")
    assert "max_steps: 2" in written.read_text()
    assert [*Path().rglob("trainer.yaml")] == [Path("trainer.yaml")]


def test_a_directory_that_takes_no_files(rlhf: Rlhf) -> None:
    Path("file").touch()
    said = rlhf.refused("validate", "-c", "config.yaml", "--trainer.default_root_dir", "file/runs")
    assert said.startswith("validate.yaml: file/runs cannot be written (Not a directory). Type another")
