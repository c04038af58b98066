"""One Ray cluster for all tests of this folder, and a model small enough to train in seconds."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.ray.model import write_tiny


@pytest.fixture(scope="session", autouse=True)
def cluster(session_leaves_nothing: None) -> Iterator[None]:
    """Start Ray before a module or a test is looked at, so that its processes are nobody's leak."""
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=512 * 2**20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a two-layer Llama's config.json and the embedded tokenizer, without weights."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory)
    yield directory
    shutil.rmtree(directory)
