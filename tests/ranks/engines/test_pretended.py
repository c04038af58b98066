"""On a GPU that is pretended engines compute what they do on a CPU, and no tensor is where it must not be.

`tests/gpu` asks a real one, which has kernels, memory and streams of its own.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from rlhf_lightning.engines import FSDP, FSDPEngine, Head, Native, NativeGenerator
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.head import Asked
from rlhf_lightning.engines.native.decoder import WholeDecoder
from rlhf_lightning.engines.native.fused import FusedDecoder
from rlhf_lightning.engines.native.kv import Cached
from rlhf_lightning.engines.packed.attention import IMPLEMENTATION
from rlhf_lightning.spec import LoRA, ModelSpec, Sampling
from tests.unit.engines import tiny
from tests.unit.engines.decoders import LATENT
from tests.unit.pretended import GPU, pretended

SAME = 1e-5
CPU = torch.device("cpu")
DRAWN = Sampling(max_new_tokens=6, temperature=0.8, top_k=40, top_p=0.95, min_p=0.01)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny.write_models(tmp_path_factory.mktemp("models"))


def learned(engine: FSDPEngine) -> dict[str, Tensor]:
    """What an engine says before and after two steps, and its weights."""
    head = engine._head
    found = {
        "before": engine.infer(tiny.rows(), temperature=0.7, asked=Asked(entropy=head == "lm"), keep=True)
    }
    for _ in range(2):
        engine.accumulate(tiny.rows(), tiny.Fit(needs_entropy=head == "lm"), tiny.counts(), temperature=0.7)
        assert engine.optimizer_step()["grad_norm"] > 0
    found["after"] = engine.infer(tiny.rows(), temperature=0.7, asked=Asked(entropy=head == "lm"))
    said = {f"{when}.{name}": rows[str(name)] for when, rows in found.items() for name in rows.keys()}  # noqa: SIM118
    return {**said, "weights": engine.give_weights()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("kind", "head"), [("lm", "lm"), ("tied", "lm"), ("scalar", "scalar")])
def test_a_gpu_learns_what_a_cpu_learns(
    models: dict[str, Path], kind: str, head: Head, *, checkpointing: bool
) -> None:
    spec = tiny.spec(models[kind], gradient_checkpointing=checkpointing, eps=1e-4)
    expected = learned(FSDPEngine(spec, head=head))
    with pretended():
        engine = FSDPEngine(spec, head=head, device=GPU)
        assert {master.device for master in engine._weights.masters.values()} == {GPU}
        found = learned(engine)
        assert {tensor.device for tensor in found.values()} == {CPU}
        assert {moment.device for moment in engine._optimizer.tensors().values()} == {GPU}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=SAME, rtol=SAME, msg=name)


@pytest.mark.parametrize("spec_of", ["bfloat16", "adapters"])
def test_bfloat16_and_adapters_learn_on_a_gpu(models: dict[str, Path], spec_of: str) -> None:
    spec = tiny.spec(models["lm"], dtype="bfloat16" if spec_of == "bfloat16" else "float32")
    if spec_of == "adapters":
        spec = ModelSpec(path=spec.path, lora=LoRA(rank=2), optimizer=spec.optimizer)
    with pretended():
        found = learned(FSDPEngine(spec, device=GPU))
    assert all(bool(value.isfinite().all()) for value in found.values())
    assert not torch.equal(found["before.log_probs"], found["after.log_probs"])


def said(spec: ModelSpec, device: torch.device, *, slots: int, sampling: Sampling) -> TensorDict:
    """Answers to prompts of several lengths."""
    rows = tiny.rows().select("prompt_ids", "prompt_mask")
    rows["row_ids"] = torch.arange(len(rows))
    with FSDPEngine(spec, device=device).generating() as decoder:
        native = NativeGenerator(
            decoder, device=device, ends=Ends(pad_token_id=0, eos_token_ids=(3,)), config=Native(slots=slots)
        )
        return native.generate(rows, sampling=sampling, seed=5)


@pytest.mark.parametrize("slots", [2, 6])
@pytest.mark.parametrize(
    "sampling", [Sampling(max_new_tokens=6, temperature=0.0), DRAWN], ids=["greedy", "drawn"]
)
def test_a_gpu_says_what_a_cpu_says(models: dict[str, Path], slots: int, sampling: Sampling) -> None:
    spec = tiny.spec(models["lm"])
    expected = said(spec, CPU, slots=slots, sampling=sampling)
    with pretended():
        found = said(spec, GPU, slots=slots, sampling=sampling)
    assert torch.equal(found["response_ids"], expected["response_ids"])
    assert torch.equal(found["response_mask"], expected["response_mask"])
    torch.testing.assert_close(found["log_probs"], expected["log_probs"], atol=SAME, rtol=0)


def test_values_may_be_narrower_than_keys(tmp_path: Path) -> None:
    config = AutoConfig.for_model("minicpm3", **{**LATENT, "vocab_size": tiny.VOCABULARY})
    spec = tiny.spec(tiny.write_noisy(tmp_path, config), eps=1e-4)
    theirs = tiny.expect(tmp_path, head="lm", temperature=0.7).outputs["log_probs"]
    expected, answers = learned(FSDPEngine(spec)), said(spec, CPU, slots=4, sampling=DRAWN)
    torch.testing.assert_close(expected["before.log_probs"], theirs, atol=SAME, rtol=0)
    with pretended():
        found, answered = learned(FSDPEngine(spec, device=GPU)), said(spec, GPU, slots=4, sampling=DRAWN)
    for name, values in expected.items():
        torch.testing.assert_close(found[name].float(), values.float(), atol=SAME, rtol=0, msg=name)
    assert torch.equal(answered["response_ids"], answers["response_ids"])


@pytest.mark.parametrize("kind", ["lm", "tied"])
def test_a_gpu_without_room_for_copies_says_the_same(
    models: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny.spec(models[kind])
    expected = said(spec, CPU, slots=4, sampling=DRAWN)
    fused: list[bool] = []
    compute = FusedDecoder.__call__

    def noted(
        self: FusedDecoder, ids: Tensor, places: Tensor, sequences: Cached, *, keep: Tensor | None = None
    ) -> Tensor | None:
        fused.append(self._steps is not None)
        return compute(self, ids, places, sequences, keep=keep)

    monkeypatch.setattr(FusedDecoder, "__call__", noted)
    for room in (1 << 34, 1):
        fused.clear()
        monkeypatch.setattr("rlhf_lightning.engines.native.fused.free_bytes", lambda _, room=room: room)
        with pretended():
            found = said(spec, GPU, slots=4, sampling=DRAWN)
        assert fused == [room > 1] * len(fused) != []
        assert torch.equal(found["response_ids"], expected["response_ids"])


def test_what_a_gpu_generates_is_not_recorded_for_the_update(models: dict[str, Path]) -> None:
    spec, config = tiny.spec(models["lm"]), FSDP(kept_tokens=10**6)
    rows = tiny.rows().select("prompt_ids", "prompt_mask")
    rows["row_ids"] = torch.arange(len(rows))
    found = []
    for device in (CPU, GPU):
        with pretended():
            engine = FSDPEngine(spec, device=device, config=config)
            with engine.generating() as decoder:
                native = NativeGenerator(
                    decoder, device=device, ends=Ends(pad_token_id=0, eos_token_ids=(3,))
                )
                answers = native.generate(rows, sampling=DRAWN, seed=5)
            assert (engine._record is None) == (device == GPU)
            learned_from = TensorDict({**tiny.rows(), **answers}, batch_size=len(rows))
            engine.accumulate(learned_from, tiny.Fit(), tiny.counts(), temperature=0.8)
            engine.optimizer_step()
            found.append(engine.give_weights())
    torch.testing.assert_close(found[1], found[0], atol=SAME, rtol=0)


def test_keys_and_values_that_were_planned_leave_no_room_for_copies(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    has_room = FusedDecoder._has_room

    def noted(self: FusedDecoder, cache_bytes: int) -> bool:
        asked.append(cache_bytes)
        return has_room(self, cache_bytes)

    monkeypatch.setattr(FusedDecoder, "_has_room", noted)
    spec, sampling = tiny.spec(models["lm"]), Sampling(max_new_tokens=6)
    with pretended():
        for slots in (0, 4, 1000):
            said(spec, GPU, slots=slots, sampling=sampling)
        longest = int(tiny.rows()["prompt_mask"].sum(1).max())
        token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, key heads, size of a head, float32
        rows = len(tiny.rows())
        assert asked == [0, *(count * (longest + 5) * token for count in (4, rows))]
        decoder = FusedDecoder(FSDPEngine(spec, device=GPU)._model)
        size = sum(weight.nbytes for weight in decoder.module.parameters())
        for free, beside, room in (
            (4, 0, True),
            (4, 3, True),
            (4, 3.1, False),
            (3.9, 0, False),
            (9, 8, True),
        ):
            monkeypatch.setattr(
                "rlhf_lightning.engines.native.fused.free_bytes", lambda _, f=free: int(f * size)
            )
            assert has_room(decoder, int(beside * size)) == room


@pytest.mark.parametrize(
    ("kind", "options", "capturable"),
    [
        ("llama", {}, True),
        ("qwen3", {}, True),
        ("gpt2", {}, True),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, False),
        ("mixtral", {}, False),
        ("qwen3_moe", {}, False),
    ],
)
def test_steps_are_captured_where_the_host_decides_nothing(
    kind: str, options: dict[str, object], *, capturable: bool
) -> None:
    config = AutoConfig.for_model(kind, **options)
    module = SimpleNamespace(config=config, parameters=list)
    config._attn_implementation = IMPLEMENTATION
    assert WholeDecoder(cast(PreTrainedModel, module)).capturable == capturable


def test_what_is_on_two_devices_does_not_meet() -> None:
    with pretended():
        there, here = torch.arange(6, device=GPU).view(2, 3), torch.arange(3)
        assert there.device == there[0].device == (there + 1).device == there.float().device == GPU
        assert (there.is_cuda, there.is_cpu, here.is_cpu) == (True, False, True)
        assert (there + torch.tensor(2)).device == GPU
        assert there.cpu().device == torch.zeros(1).device == CPU
        assert there[:, here].device == here.to(GPU).device == torch.zeros_like(there).device == GPU
        with pytest.raises(RuntimeError, match="same device"):
            there + here
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([there[0], here])
        with pytest.raises(RuntimeError, match="same device"):
            torch.where(here > 0, there, 0)
        with pytest.raises(TypeError, match="can't convert cuda"):
            np.asarray(there.numpy())
        weight = torch.ones(3, device=GPU, requires_grad=True)
        (weight * 2).sum().backward()
        assert weight.grad is not None
        assert (weight.grad + weight).device == GPU
    assert there.device == CPU
