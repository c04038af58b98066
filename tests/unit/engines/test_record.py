"""An update of answers under the weights that drew them computes none of their products anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig

from rlhf_lightning.engines import FSDP, FSDPEngine, NativeGenerator
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.functional.aggregate import Counts, Loss
from rlhf_lightning.spec import Sampling
from tests.unit.engines import tiny
from tests.unit.engines.decoders import asked
from tests.unit.engines.tiny import Dtype, Fit

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without it")

STOPS = tuple(range(20))
DRAWN = Sampling(max_new_tokens=9)
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "a key for each query": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
}


@dataclass(frozen=True)
class Distance(Loss):
    """How far log-probabilities are from those that tokens were drawn with."""

    columns: tuple[str, ...] = ("log_probs",)

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        apart = (outputs["log_probs"] - rows["log_probs"])[rows["response_mask"]].abs().sum()
        return outputs["log_probs"].sum(), {"test/distance": apart.detach()}


def written(directory: Path, kind: str = "llama") -> Path:
    family, options = MODELS[kind]
    return tiny.write_noisy(directory, AutoConfig.for_model(family, **tiny.SIZES | options))


def made(
    path: Path, *, kept: int = 1000, dtype: Dtype = "float32", gradient_checkpointing: bool = False
) -> FSDPEngine:
    model = tiny.spec(path, dtype=dtype, gradient_checkpointing=gradient_checkpointing)
    return FSDPEngine(model, config=FSDP(max_tokens_per_micro_batch=60, kept_tokens=kept))


def generator(engine: FSDPEngine, config: Native | None = None) -> Callable[..., TensorDict]:
    def generate(rows: TensorDict, sampling: Sampling = DRAWN, seed: int = 3) -> TensorDict:
        with engine.generating() as decoder:
            native = NativeGenerator(
                decoder, device="cpu", ends=Ends(pad_token_id=0, eos_token_ids=STOPS), config=config
            )
            answers = native.generate(rows, sampling=sampling, seed=seed)
        whole = TensorDict({**rows, **answers}, batch_size=rows.batch_size)
        draw = torch.Generator().manual_seed(2)
        whole["advantages"] = torch.randn(answers["log_probs"].shape, generator=draw)
        return whole

    return generate


@contextmanager
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens of the products that linear layers compute."""
    found: list[int] = []
    linear = torch.nn.functional.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found.append(x.shape[-2])
        return linear(x, weight, bias)

    with monkeypatch.context() as patch:
        patch.setattr("rlhf_lightning.engines.host_linear.linear", counted)
        yield found


def gradients(engine: FSDPEngine, rows: TensorDict) -> dict[str, Tensor]:
    loss = Fit()
    for master in engine._weights.masters.values():
        master.grad = None
    engine.accumulate(rows, loss, loss.count(rows), temperature=1.0)
    return tiny.gradients(engine)


def recomputes(
    engine: FSDPEngine, rows: TensorDict, monkeypatch: pytest.MonkeyPatch, plain: FSDPEngine | None = None
) -> bool:
    """Whether an update computes products of linear layers; its gradients are those of `plain`."""
    with products(monkeypatch) as found:
        mine = gradients(engine, rows)
    if plain is not None:
        assert tiny.distance(mine, gradients(plain, rows)) < 1e-5  # float32 sums in another order
    return bool(found)


CASES = [
    *((kind, Native(), 3) for kind in MODELS),
    *(("llama", Native(slots=3, refill=1), n) for n in (1, 3)),
]


@pytest.mark.parametrize(("kind", "config", "samples"), CASES)
def test_the_gradients_are_those_of_a_whole_pass(
    kind: str, config: Native, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, kind)
    engine, plain = made(path), made(path, kept=0)
    rows = generator(engine, config)(asked(5, 2, 7, 7, 1, samples=samples))
    assert len(set(rows["response_mask"].sum(1).tolist())) > 2
    assert not recomputes(engine, rows, monkeypatch, plain)
    for layer in engine._model.modules():
        assert getattr(layer, "known_output", None) is None


def test_the_outputs_are_what_was_drawn_with(tmp_path: Path) -> None:
    engine = made(written(tmp_path))
    rows = generator(engine)(asked(5, 2, 7))
    loss = Distance()
    metrics = engine.accumulate(rows, loss, loss.count(rows), temperature=1.0)
    assert 0 <= float(metrics["test/distance"]) / int(rows["response_mask"].sum()) < 1e-6


def test_any_order_and_any_part_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    engine, plain = made(path), made(path, kept=0)
    rows = generator(engine)(asked(5, 2, 7, 4))
    for part in (rows[torch.tensor([2, 0])], rows[torch.tensor([3, 3, 1])]):
        assert not recomputes(engine, part, monkeypatch, plain)


def other_tokens(engine: FSDPEngine, rows: TensorDict) -> TensorDict:
    longest = int(rows["response_mask"].sum(1).argmax())
    rows["response_ids"][longest, 0] -= 1
    return rows


def a_row_from_elsewhere(engine: FSDPEngine, rows: TensorDict) -> TensorDict:
    elsewhere = generator(engine)(asked(5, 2, 7, 7, 1), DRAWN, 8)
    generator(engine)(asked(5, 2, 7, 7, 1))
    return torch.cat([rows[:4], elsewhere[4:]])  # type: ignore[return-value]


def another_generation(engine: FSDPEngine, rows: TensorDict) -> TensorDict:
    generator(engine)(asked(3, 3), DRAWN, 4)
    return rows


def after_a_step(engine: FSDPEngine, rows: TensorDict) -> TensorDict:
    gradients(engine, rows)
    engine.optimizer_step()
    return rows


def after_a_transfer(engine: FSDPEngine, rows: TensorDict) -> TensorDict:
    engine.take_weights([(name, weight + 0.01) for name, weight in engine.weights()])
    return rows


def after_an_absence(engine: FSDPEngine, rows: TensorDict) -> TensorDict:
    engine.offload(["parameters"])
    engine.reload(["parameters"])
    return rows


@pytest.mark.parametrize(
    "change",
    [
        other_tokens,
        a_row_from_elsewhere,
        another_generation,
        after_a_step,
        after_a_transfer,
        after_an_absence,
    ],
    ids=lambda change: change.__name__,
)
def test_what_the_record_lacks_is_computed(
    change: Callable[[FSDPEngine, TensorDict], TensorDict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    each = []
    for kept in (1000, 0):
        engine = made(path, kept=kept)
        rows = change(engine, generator(engine)(asked(5, 2, 7, 7, 1)))
        with products(monkeypatch) as found:
            each.append((gradients(engine, rows), len(found)))
    (found_gradients, mine), (expected, whole) = each
    assert 0 < mine <= whole
    assert tiny.distance(found_gradients, expected) < 1e-4  # after a step of Adam


@pytest.mark.parametrize(
    "options",
    [{"kept": 5 * 16 - 1 - 5}, {"dtype": "bfloat16"}, {"gradient_checkpointing": True}],
    ids=["no room", "bfloat16", "checkpointing"],
)
def test_where_it_does_not_pay_nothing_is_recorded(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(written(tmp_path), **options)
    rows = generator(engine)(asked(7, 7, 7, 7, 7))
    assert recomputes(engine, rows, monkeypatch)


def test_layers_that_are_compiled_are_given_no_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_lightning.engines.fsdp.engine.compile_layers", lambda layers: None)
    config = FSDP(kept_tokens=1000, compile_layers=True)
    assert FSDPEngine(tiny.spec(written(tmp_path)), config=config)._record is None


def test_room_for_all_tokens_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(written(tmp_path), kept=5 * (7 + 8))
    rows = generator(engine)(asked(7, 7, 7, 7, 7))
    assert not recomputes(engine, rows, monkeypatch)


def test_no_rows_have_no_answers(tmp_path: Path) -> None:
    answers = generator(made(written(tmp_path)))(asked(5, 2)[:0])
    assert answers["response_ids"].shape == (0, 9)


def test_greedy_answers_disturb_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(written(tmp_path))
    generate = generator(engine)
    rows = generate(asked(5, 2, 7))
    assert engine._record is not None
    greedy = generate(asked(5, 2, 7), Sampling(max_new_tokens=9, temperature=0))
    for outputs in engine._record._products.values():
        assert sum(map(len, outputs)) <= engine._record.size
    assert not recomputes(engine, rows, monkeypatch)
    assert recomputes(engine, greedy, monkeypatch)


def test_a_generation_that_failed_is_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(written(tmp_path))
    generate = generator(engine)
    rows = generate(asked(5, 2, 7))

    def broken(*_: object) -> None:
        raise KeyError

    with monkeypatch.context() as patch:
        patch.setattr("rlhf_lightning.engines.native.responses.Responses.record", broken)
        with pytest.raises(KeyError):
            generate(asked(5, 2, 7))
    assert engine._record is not None
    calls = len(engine._record._logits_of)
    generate(asked(5, 2, 7), Sampling(max_new_tokens=50, temperature=0))
    assert len(engine._record._logits_of) == calls
    assert recomputes(engine, rows, monkeypatch)


def test_prompts_of_many_tokens_go_in_parts_and_a_longer_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("fused", "slots"):
        monkeypatch.setattr(f"rlhf_lightning.engines.native.{module}.MANY_TOKENS", 12)
    path = written(tmp_path)
    engine, plain = made(path), made(path, kept=0)
    rows = generator(engine)(asked(6, 6, 12, 5))
    short, long = rows[torch.tensor([0, 1, 3])], rows[2:3]
    assert not recomputes(engine, short, monkeypatch, plain)
    assert recomputes(engine, long, monkeypatch)


def test_steps_of_many_rows_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fused", "slots"):
        monkeypatch.setattr(f"rlhf_lightning.engines.native.{module}.MANY_TOKENS", 4)
    path = written(tmp_path)
    engine, plain = made(path), made(path, kept=0)
    rows = asked(2, 1, 2, 1)
    with engine.generating() as decoder:
        native = NativeGenerator(decoder, device="cpu", ends=Ends(pad_token_id=0))
        rows.update(native.generate(rows, sampling=DRAWN, seed=3))
    rows["advantages"] = torch.ones(4, 9)
    assert recomputes(engine, rows, monkeypatch, plain)


def test_answers_that_went_on_after_a_pause_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they had said is read anew, and nobody asks what comes next in the midst of it."""
    path = written(tmp_path)
    engine, plain = made(path), made(path, kept=0)
    rows = asked(5, 2, 7)
    with engine.generating() as decoder:
        native = NativeGenerator(decoder, device="cpu", ends=Ends(pad_token_id=0))
        steps = iter(range(100))
        begun = native.resume(rows, sampling=DRAWN, seed=3, pause=lambda ended: next(steps) >= 4)
        assert int(begun["response_mask"].sum(1).max()) < 9
        whole = TensorDict({**rows, **begun}, batch_size=3)
        answers = native.resume(whole, sampling=DRAWN, seed=3, pause=lambda ended: False)
    whole.update(answers)
    whole["advantages"] = torch.ones(3, 9)
    assert recomputes(engine, whole, monkeypatch, plain)


@pytest.mark.parametrize("slots", [0, 1])
def test_answers_that_are_handed_over_in_parts_are_all_in_it(
    slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    engine, plain = made(path), made(path, kept=0)
    rows = asked(5, 2, 7)
    ends, config = Ends(pad_token_id=0, eos_token_ids=STOPS), Native(slots=slots)
    with engine.generating() as decoder:
        native = NativeGenerator(decoder, device="cpu", ends=ends, config=config)
        parts = list(native.finished(rows, sampling=DRAWN, seed=3, parts=3))
    whole = rows[torch.cat([where for where, _ in parts])]
    whole.update({name: torch.cat([said[name] for _, said in parts]) for name in parts[0][1].keys()})  # noqa: SIM118
    assert len(set(whole["response_mask"].sum(1).tolist())) > 1
    whole["advantages"] = torch.ones(3, 9)
    assert not recomputes(engine, whole, monkeypatch, plain)


def test_it_is_freed_as_the_weights_change(tmp_path: Path) -> None:
    engine = made(written(tmp_path))
    rows = generator(engine)(asked(5, 2, 7))
    assert engine._record is not None
    assert len(engine._record._products) == 2 * 4 + 1
    kept = [weakref.ref(output) for outputs in engine._record._products.values() for output in outputs]
    gradients(engine, rows)
    engine.optimizer_step()
    gc.collect()
    assert [store() for store in kept] == [None] * len(kept)
