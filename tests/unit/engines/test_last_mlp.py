"""The MLP of the last layer computes only the tokens whose outputs are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from rlhf_lightning.engines import FSDP, FSDPEngine, Head
from rlhf_lightning.engines.fsdp.shards import layers_of
from rlhf_lightning.engines.packed.last_mlp import needed_tokens, shorten_last_mlp
from rlhf_lightning.engines.packed.packing import pack
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Fit

ROWS = 3
PROMPT, RESPONSE = 8, 4
FAMILIES: dict[str, PreTrainedConfig] = {
    **{
        name: AutoConfig.for_model(name, **tiny.SIZES)
        for name in ("llama", "qwen2", "qwen3", "mistral", "gemma")
    },
    "gpt2": AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=61),
}


def rows(prompt: int = PROMPT, response: int = RESPONSE) -> TensorDict:
    draw = torch.Generator().manual_seed(1)
    sizes = {"prompt": prompt, "response": response}
    columns = {f"{k}_ids": torch.randint(1, 61, (ROWS, n), generator=draw) for k, n in sizes.items()}
    columns |= {f"{k}_mask": torch.ones(ROWS, n, dtype=torch.bool) for k, n in sizes.items()}
    columns["advantages"] = torch.randn(ROWS, response, generator=draw)
    return TensorDict(columns, batch_size=ROWS)


def made(path: Path, head: Head = "lm", *, checkpointing: bool = False, **config: bool | int) -> FSDPEngine:
    model = tiny.spec(path, gradient_checkpointing=checkpointing)
    return FSDPEngine(model, head=head, config=FSDP(**config))  # type: ignore[arg-type]


@contextmanager
def seen(engine: FSDPEngine) -> Iterator[list[tuple[int, int]]]:
    """How many tokens go through the inner layers of each `mlp`: (number of the layer, tokens)."""
    found: list[tuple[int, int]] = []
    hooks = []
    for number, layer in enumerate(layers_of(engine._model)):
        first = next(m for m in layer.mlp.modules() if not list(m.children()))  # type: ignore[union-attr]

        def note(module: nn.Module, args: tuple[Tensor], number: int = number) -> None:
            found.append((number, args[0].shape[-2]))

        hooks.append(first.register_forward_pre_hook(note))
    yield found
    for hook in hooks:
        hook.remove()


def learned(engine: FSDPEngine, batch: TensorDict) -> tuple[float, dict[str, Tensor]]:
    loss = Fit()
    metrics = engine.accumulate(batch, loss, loss.count(batch), temperature=1.0)
    return float(metrics["test/loss"]), tiny.gradients(engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_learned_is_what_whole_layers_teach(
    family: str, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, batch = tiny.write_noisy(tmp_path, FAMILIES[family]), rows()
    engine = made(path, checkpointing=checkpointing)
    with seen(engine) as tokens:
        loss, gradients = learned(engine, batch)
    whole = ROWS * (PROMPT + RESPONSE - 1)
    assert set(tokens) == {(0, whole), (1, ROWS * RESPONSE)}
    monkeypatch.setattr("rlhf_lightning.engines.packed.last_mlp._WORTH", 1.0)
    plain = made(path, checkpointing=checkpointing)
    with seen(plain) as tokens:
        expected, others = learned(plain, batch)
    assert set(tokens) == {(0, whole), (1, whole)}
    assert loss == pytest.approx(expected, rel=1e-6)
    assert tiny.distance(gradients, others) < 1e-6


@pytest.mark.parametrize(("head", "tokens"), [("lm", 11), ("scalar", 11), ("reward", 12)])
def test_every_head_reads_what_whole_layers_say(
    head: Head, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, batch = tiny.write_noisy(tmp_path, FAMILIES["llama"]), rows()
    engine = made(path, head)
    with seen(engine) as found:
        outputs = engine.infer(batch, temperature=1.0)
    assert found == [(0, ROWS * tokens), (1, ROWS * RESPONSE)]
    monkeypatch.setattr("rlhf_lightning.engines.packed.last_mlp._WORTH", 1.0)
    for name, values in engine.infer(batch, temperature=1.0).items():
        torch.testing.assert_close(outputs[name], values, atol=1e-6, rtol=1e-5)


def test_short_prompts_are_not_worth_it(tmp_path: Path) -> None:
    engine = made(tiny.write_noisy(tmp_path, FAMILIES["llama"]))
    with seen(engine) as found:
        engine.infer(rows(prompt=2, response=12), temperature=1.0)
    assert found == [(0, ROWS * 13), (1, ROWS * 13)]


def test_a_shared_prompt_is_needed_once() -> None:
    batch = rows()
    batch["prompt_ids"] = batch["prompt_ids"][:1].expand(ROWS, -1)
    packed = pack(batch, place="before")
    places = packed.sequences.needed
    assert places is not None
    assert len(packed.keep) == ROWS * RESPONSE
    assert places.tolist() == sorted(set(packed.keep.tolist()))
    assert len(places) == 1 + ROWS * (RESPONSE - 1)


def test_what_is_skipped_is_a_share_of_what_is_computed() -> None:
    """A shared prompt of 4 and three responses of 11 tokens, of which one each is in no pass: 34, 31 read."""
    batch = rows(prompt=4, response=11)
    assert pack(batch, place="before").sequences.needed is not None
    batch["prompt_ids"] = batch["prompt_ids"][:1].expand(ROWS, -1)
    packed = pack(batch, place="before")
    assert packed.input_ids.shape == (1, 34)
    assert packed.sequences.needed is None


@pytest.mark.parametrize(("tokens", "left_out"), [(10, True), (9, False)])
def test_a_tenth_of_the_tokens_is_worth_skipping(tokens: int, left_out: bool) -> None:
    assert (needed_tokens(torch.arange(9), tokens=tokens) is not None) == left_out


def test_a_layer_that_calls_it_otherwise_stays_whole() -> None:
    """As Granite's mixtures of experts do."""
    layer = nn.Linear(2, 2)
    shorten_last_mlp([])
    shorten_last_mlp([layer])
    assert not layer._forward_pre_hooks


def test_compiled_layers_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_lightning.engines.fsdp.engine.compile_layers", lambda layers: None)
    monkeypatch.setattr("rlhf_lightning.engines.fsdp.config.check_compiler", lambda: None)
    engine = made(tiny.write_noisy(tmp_path, FAMILIES["llama"]), compile_layers=True)
    with seen(engine) as found:
        engine.infer(rows(), temperature=1.0)
    assert found == [(0, ROWS * 11), (1, ROWS * 11)]
