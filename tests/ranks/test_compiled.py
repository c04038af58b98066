"""Decoder layers that are compiled compute, learn and generate as they did."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.config import cpp

from rlhf_lightning.engines import FSDP, FSDPEngine, Head, Native, NativeGenerator
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.spec import LoRA, ModelSpec, Sampling
from tests.unit import spmd
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Fit, flat

KEPT = 1000
"""Tokens whose passes the update goes back from."""


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Forget what others have compiled."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and differentiate as always, and compute the graphs without C++, which takes its seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def trained(
    spec: ModelSpec, head: Head, config: FSDP, group: dist.ProcessGroup | None = None
) -> tuple[list[Tensor], Tensor]:
    """What three passes over three numbers of tokens say, and how the updates have changed the weights."""
    engine = FSDPEngine(spec, head=head, config=config, group=group)
    mine = tiny.rows() if group is None else tiny.rows()[group.rank() :: group.size()]
    before, outputs = flat(engine), []
    for rows in (mine, mine[:2], mine[1:]):
        found = engine.infer(rows, temperature=1.0, keep=True)
        outputs.append(found["log_probs" if head == "lm" else "values"])
        engine.accumulate(rows, Fit(), tiny.counts(), temperature=1.0)
        engine.optimizer_step()
    return outputs, flat(engine) - before


def same(ours: tuple[list[Tensor], Tensor], theirs: tuple[list[Tensor], Tensor]) -> None:
    for mine, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    # In all of them: where a gradient is nearly 0, Adam makes much of its last bits.
    assert float((ours[1] - theirs[1]).norm() / theirs[1].norm()) < 1e-3


def both(spec: ModelSpec, head: Head) -> None:
    plain, compiled = (FSDP(shard=1, kept_tokens=KEPT, compile_layers=on) for on in (False, True))
    expected = trained(spec, head, plain)
    assert not counters["stats"]
    same(trained(spec, head, compiled), expected)
    assert counters["stats"]["unique_graphs"] > 0


def test_compiled_layers_learn_the_same(paths: dict[str, Path]) -> None:
    both(tiny.spec(paths["lm"]), "lm")


@pytest.mark.usefixtures("traced")
def test_layers_that_are_recomputed_and_adapted_learn_the_same_compiled(paths: dict[str, Path]) -> None:
    spec = replace(tiny.spec(paths["scalar"], gradient_checkpointing=True), lora=LoRA(rank=4))
    both(spec, "scalar")


@pytest.mark.usefixtures("traced")
def test_layers_and_numbers_of_tokens_share_what_is_compiled(paths: dict[str, Path]) -> None:
    """A model of two layers has as many graphs as its first layer alone, whatever the tokens."""
    engine = FSDPEngine(tiny.spec(paths["lm"]), config=FSDP(compile_layers=True))
    rows, found = tiny.rows(), []
    for some in (rows, rows[:3], rows[2:], rows[1:4]):
        engine.infer(some, temperature=1.0)
        found.append(counters["stats"]["unique_graphs"])
    assert found == [found[0]] * 4
    assert found[0] > 0, "something is compiled"
    engine.infer(rows, temperature=1.0)
    with engine.generating() as decoder:
        generator = NativeGenerator(
            decoder, device=torch.device("cpu"), ends=Ends(pad_token_id=0), config=Native()
        )
        rows["row_ids"] = torch.arange(len(rows))
        generator.generate(rows, sampling=Sampling(max_new_tokens=3), seed=0)
    assert counters["stats"]["unique_graphs"] == found[0], "what generates is not compiled"


def on_ranks(group: dist.ProcessGroup, spec: ModelSpec) -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")
    options = {"reshard_after_forward": True, "defer_gradient_reduction": False}
    expected = trained(spec, "lm", FSDP(**options), group)
    assert not counters["stats"]
    same(trained(spec, "lm", FSDP(compile_layers=True, **options), group), expected)
    assert counters["stats"]["unique_graphs"] > 0


def test_compiled_layers_of_shards_learn_the_same(paths: dict[str, Path]) -> None:
    spec = tiny.spec(paths["lm"])
    spmd.run_within(150, 2, lambda group: on_ranks(group, spec))  # most of it compiles


@pytest.mark.parametrize(("gpu", "variable"), [(False, "CXX"), (True, "CC")])
def test_without_a_compiler_it_is_refused(gpu: bool, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(FSDP(compile_layers=True).check_devices, gpu=gpu)
    check()
    monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(ValueError, match=r"train\.compile_layers=true: .* \(no-such-compiler\) on the PATH"):
        check()
    FSDP().check_devices(gpu=gpu)


def test_compilers_that_torch_does_not_call_are_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = partial(FSDP(compile_layers=True).check_devices, gpu=False)
    called = cpp.cxx[-1]
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in {"g++", "clang++", "c++"} - {called}:
        (tmp_path / name).touch(mode=0o755)
    with pytest.raises(ValueError, match=re.escape(f"({called}) on the PATH of this machine, and every")):
        check()
    monkeypatch.setenv("CXX", "c++")
    check()
    monkeypatch.delenv("CXX")
    (tmp_path / called).touch(mode=0o755)
    check()


def test_a_gpu_needs_no_compiler_of_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles what launches its kernels as C."""
    check = partial(FSDP(compile_layers=True).check_devices, gpu=True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "g++").touch(mode=0o755)
    with pytest.raises(ValueError, match=r"no C compiler \(gcc or clang\) on the PATH .* Install gcc, "):
        check()
    for name in ("gcc", "clang"):
        (tmp_path / name).touch(mode=0o755)
        check()
        (tmp_path / name).unlink()


def test_divided_layers_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"compile_layers=true with tensor=2: divided layers are not compiled"
    ):
        FSDP(compile_layers=True, tensor=2)
