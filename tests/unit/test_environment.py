"""What is set in the environment for a library, and put back."""

from __future__ import annotations

import gc
import os
import random
from unittest import mock

import numpy as np
import pytest
import torch

from rlhf_lightning.engines.vllm.process import process_restored
from rlhf_lightning.environment import defaults, environment, for_deepspeed


def test_all_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    before = dict(os.environ)
    with environment({"CHANGED": "within"}):
        assert os.environ["CHANGED"] == "within"
        os.environ["ADDED"] = os.environ.pop("REMOVED")
    assert dict(os.environ) == before


def test_defaults_are_there_meanwhile_and_what_others_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "theirs")
    before = dict(os.environ)
    with defaults({"GIVEN": "ours", "UNSET": "ours", "TAKEN": "ours"}):
        assert [os.environ[name] for name in ("GIVEN", "UNSET", "TAKEN")] == ["theirs", "ours", "ours"]
        del os.environ["TAKEN"]
        monkeypatch.setenv("ADDED", "theirs")
    assert dict(os.environ) == before | {"ADDED": "theirs"}


@pytest.mark.parametrize(("gpu", "told"), [(False, {"DS_ACCELERATOR": "cpu"}), (True, {})])
def test_deepspeed_is_told_of_a_host_without_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, *, gpu: bool, told: dict[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert for_deepspeed() == told


def test_vllm_has_the_users_variables_but_those_that_would_override_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "unfreeze", lambda: None)  # of objects that this session has frozen
    theirs = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    theirs |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    with process_restored():
        assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ


def test_what_vllm_does_to_the_process_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    thawed: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(True))
    set_num_threads, threads, before = torch.set_num_threads, torch.get_num_threads(), dict(os.environ)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    with process_restored():
        os.environ["ADDED"] = "within"
        torch.set_num_threads(threads + 1)
        torch.set_num_threads = lambda *_: None
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(99)
    assert thawed
    assert torch.set_num_threads is set_num_threads
    assert torch.get_num_threads() == threads
    assert dict(os.environ) == before
    np.testing.assert_equal((random.getstate(), np.random.get_state(legacy=False)), states[1:])
    assert torch.equal(torch.get_rng_state(), states[0])


@pytest.mark.parametrize("registered", [True, False])
def test_vllm_neither_binds_the_memory_nor_sets_the_precision(
    monkeypatch: pytest.MonkeyPatch, *, registered: bool
) -> None:
    """Its operation is there once vLLM has been used, and torch finds it anew where it is not."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    operations, bind = vars(torch.ops._C), mock.Mock()
    monkeypatch.setitem(operations, "init_cpu_memory_env", bind)
    if not registered:
        del operations["init_cpu_memory_env"]
    set_precision, precision = torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
    with process_restored():
        torch.ops._C.init_cpu_memory_env("0")
        torch.set_float32_matmul_precision("medium")
    assert operations.get("init_cpu_memory_env", "absent") == (bind if registered else "absent")
    bind.assert_not_called()
    assert torch.set_float32_matmul_precision is set_precision
    assert torch.get_float32_matmul_precision() == precision


def test_a_start_that_fails_is_undone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    gpu, set_num_threads = _PretendedGPU(), torch.set_num_threads
    gpu.patch(monkeypatch)

    def start() -> None:
        torch.cuda.set_stream(gpu.streams[1])
        torch.set_num_threads = lambda *_: None
        raise MemoryError

    with pytest.raises(MemoryError), process_restored():
        start()
    assert gpu.set[-1] is gpu.streams[0]
    assert torch.set_num_threads is set_num_threads


class _PretendedGPU:
    """Streams of a GPU, and the functions of `torch.cuda` that ask for them or set them."""

    def __init__(self) -> None:
        self.state = torch.zeros(1, dtype=torch.uint8)
        self.streams = [mock.create_autospec(torch.cuda.Stream, instance=True) for _ in range(2)]
        self.set = [self.streams[0]]

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        functions = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "get_rng_state": lambda _: self.state.clone(),
            "set_rng_state": lambda state, _: self.state.copy_(state),
            "current_stream": lambda: self.set[-1],
            "set_stream": self.set.append,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)


def test_a_stream_that_vllm_sets_is_waited_for_and_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    gpu = _PretendedGPU()
    gpu.patch(monkeypatch)
    with process_restored():
        torch.cuda.set_stream(gpu.streams[1])
        gpu.state.fill_(9)  # as vLLM seeds it
    assert gpu.state == 0
    assert gpu.set == [gpu.streams[0], gpu.streams[1], gpu.streams[0]]
    gpu.streams[0].wait_stream.assert_called_once_with(gpu.streams[1])


def test_vllm_is_told_of_the_stream_before_it_would_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    gpu = _PretendedGPU()
    gpu.patch(monkeypatch)
    with process_restored():
        pass
    assert gpu.set == [gpu.streams[0], gpu.streams[0]]
