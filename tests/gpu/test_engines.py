"""An engine computes on a GPU what it computes on a CPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.engines import PARTS, FSDPEngine, Native, NativeGenerator, TrainEngine
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.head import Asked
from rlhf_lightning.engines.native import cuda_graphs
from rlhf_lightning.engines.native.cache import Cache
from rlhf_lightning.engines.native.cuda_graphs import GraphCapture
from rlhf_lightning.engines.native.decoder import Decoder, WholeDecoder
from rlhf_lightning.engines.native.kv import Cached
from rlhf_lightning.engines.native.kv_gpu import GPUDecode
from rlhf_lightning.engines.packed.attention import use_interface
from rlhf_lightning.engines.packed.layer import Layer
from rlhf_lightning.spec import Sampling
from tests.unit.engines import tiny
from tests.unit.engines.decoders import KINDS, VOCAB, agree
from tests.unit.engines.decoders import decoder as decoder_of_kind

SAME = 1e-4
"""float32, in another order, without TensorFloat-32."""
STEPS = 3
PROMPTS, NEW = 24, 16
ENDS = tuple("!'05")
"""Texts that end an answer, of a token each."""
Replay = Callable[[], torch.Tensor | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_causal(tmp_path_factory.mktemp("model"))


def learned(engine: TrainEngine) -> torch.Tensor:
    for _ in range(STEPS):
        engine.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
        assert engine.optimizer_step()["grad_norm"] > 0
    return engine.give_weights()


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_fsdp_learns_the_same(model: Path, gpu: torch.device, gradient_checkpointing: bool) -> None:
    spec = tiny.spec(model, gradient_checkpointing=gradient_checkpointing)
    here, there = FSDPEngine(spec), FSDPEngine(spec, device=gpu)
    found = [
        engine.infer(tiny.rows(), temperature=0.7, asked=Asked(entropy=True)) for engine in (here, there)
    ]
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(found[1][name], found[0][name], atol=SAME, rtol=0)
    torch.testing.assert_close(learned(there), learned(here), atol=SAME, rtol=0)


def gradient(engine: FSDPEngine) -> torch.Tensor:
    """Of all parameters."""
    engine.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
    gradients = [master.grad for master in engine._weights.masters.values()]
    return torch.cat([found.flatten().cpu() for found in gradients if found is not None])


def test_bfloat16_is_near_float32(model: Path, gpu: torch.device) -> None:
    exact, rough = FSDPEngine(tiny.spec(model)), FSDPEngine(tiny.spec(model, dtype="bfloat16"), device=gpu)
    expected, found = (e.infer(tiny.rows(), temperature=1.0)["log_probs"] for e in (exact, rough))
    assert found.dtype == torch.float32
    assert 0 < float((found - expected).abs().max()) < 0.1
    expected, found = gradient(exact), gradient(rough)
    assert float(torch.cosine_similarity(found, expected, dim=0)) > 0.999
    torch.testing.assert_close(found.norm(), expected.norm(), rtol=0.02, atol=0)


def prompts(vocabulary: int) -> TensorDict:
    """Rows of 1 to `tiny.PROMPT` tokens."""
    generator = torch.Generator().manual_seed(3)
    columns = {
        "prompt_ids": torch.randint(4, vocabulary, (PROMPTS, tiny.PROMPT), generator=generator),
        "prompt_mask": torch.arange(tiny.PROMPT) >= torch.arange(PROMPTS)[:, None] % tiny.PROMPT,
        "row_ids": torch.arange(PROMPTS),
    }
    return TensorDict(columns, batch_size=PROMPTS)


def said(
    decoder: Decoder, device: torch.device, *, slots: int = 0, stops: tuple[str, ...] = ENDS
) -> TensorDict:
    """Answers to prompts; on a GPU its steps must be replayed."""
    native = NativeGenerator(
        decoder,
        device=device,
        ends=Ends(pad_token_id=0, eos_token_ids=(3,), tokenizer=load_tokenizer("embedded")),
        config=Native(slots=slots),
    )
    graphs: list[Replay] = []
    record = GraphCapture.capture

    def counted(self: GraphCapture, compute: Replay) -> Replay:
        graphs.append(record(self, compute))
        return graphs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphCapture, "capture", counted)
        rows = prompts(native.decoder.config.vocab_size)
        answers = native.generate(rows, sampling=Sampling(max_new_tokens=NEW, stop_strings=stops), seed=5)
    assert bool(graphs) == (device.type == "cuda")
    return answers


@pytest.mark.parametrize("stops", [ENDS, ()], ids=["texts", "draws in graphs"])
@pytest.mark.parametrize("slots", [0, 5])
def test_generation_says_the_same(model: Path, gpu: torch.device, slots: int, stops: tuple[str, ...]) -> None:
    answers = []
    for device in (torch.device("cpu"), gpu):
        with FSDPEngine(tiny.spec(model), device=device).generating() as decoder:
            answers.append(said(decoder, device, slots=slots, stops=stops))
    agree(answers[1], answers[0], within=SAME)


@pytest.mark.parametrize("kind", [*KINDS, "minicpm3"])
def test_models_through_their_own_layers_say_the_same(kind: str, gpu: torch.device) -> None:
    module = decoder_of_kind(kind)
    use_interface(module)
    expected = said(WholeDecoder(module), torch.device("cpu"))
    torch.nn.Module.to(module, gpu)
    agree(said(WholeDecoder(module), gpu), expected, within=SAME)


class Asking(WholeDecoder):
    """Asks the GPU for a number in every step."""

    def __call__(
        self, ids: torch.Tensor, places: torch.Tensor, sequences: Cached, *, keep: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """See `Decoder.__call__`."""
        return super().__call__(ids, places + 0 * int(ids[0]), sequences, keep=keep)


def test_what_asks_the_gpu_goes_on_without_being_replayed(gpu: torch.device) -> None:
    module = decoder_of_kind("llama")
    use_interface(module)
    rows, sampling = prompts(VOCAB), Sampling(max_new_tokens=NEW)
    before = torch.cuda.current_stream(gpu)
    answers = []
    for device in (torch.device("cpu"), gpu):
        torch.nn.Module.to(module, device)
        native = NativeGenerator(Asking(module), device=device, ends=Ends(pad_token_id=0, eos_token_ids=(3,)))
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            patch.setattr(cuda_graphs, "_not_capturable", set())
            answers.append(native.generate(rows, sampling=sampling, seed=5))
        assert any("cannot be captured" in str(each.message) for each in told) == (device == gpu)
    assert torch.cuda.current_stream(gpu) == before
    agree(answers[1], answers[0], within=SAME)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("slots", [0, 5])
def test_bfloat16_says_what_it_scores(kind: str, gpu: torch.device, slots: int, tmp_path: Path) -> None:
    decoder_of_kind(kind).save_pretrained(tmp_path)
    engine = FSDPEngine(tiny.spec(tmp_path, dtype="bfloat16"), device=gpu)
    with engine.generating() as decoder:
        answers = said(decoder, gpu, slots=slots)
        scored = engine.infer(TensorDict({**prompts(VOCAB), **answers}, batch_size=PROMPTS), temperature=1.0)
    mask = answers["response_mask"]
    assert len(set(mask.sum(1).tolist())) > 2
    difference = (scored["log_probs"] - answers["log_probs"])[mask].abs()
    assert float(difference.max()) < 0.15
    assert float(difference.mean()) < 0.02


def test_rows_may_have_more_heads_than_one_call_of_flash_attention_takes(gpu: torch.device) -> None:
    rows = 40_000
    shapes, places = ((rows, 2, 1, 16), (rows, 2, 16), (rows, 2, 16)), torch.zeros(rows, dtype=torch.int64)
    tokens, found = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes], []
    for device in (torch.device("cpu"), gpu):
        query, key, value = (part.to(device) for part in tokens)
        step = GPUDecode(Cache(rows, 2), places.to(device))
        found.append(step.attend_by_token(query, key, value, Layer(0, 0.3, 0)))
    torch.testing.assert_close(found[1].cpu(), found[0], atol=0.01, rtol=0.01)


def test_a_generation_leaves_no_memory_behind(model: Path, gpu: torch.device) -> None:
    with FSDPEngine(tiny.spec(model), device=gpu).generating() as decoder:
        said(decoder, gpu)
        gc.collect()
        gc.disable()
        try:
            before = torch.cuda.memory_allocated(gpu)
            said(decoder, gpu)
            assert torch.cuda.memory_allocated(gpu) <= before
        finally:
            gc.enable()


def test_what_is_offloaded_leaves_the_gpu(model: Path, gpu: torch.device) -> None:
    engine = FSDPEngine(tiny.spec(model), device=gpu)
    before = learned(engine)
    sizes, held = engine.memory(), torch.cuda.memory_allocated(gpu)
    engine.offload(PARTS)
    freed = held - torch.cuda.memory_allocated(gpu)
    assert freed >= sum(sizes[part] for part in ("parameters", "optimizer")) > 0
    engine.reload(PARTS)
    assert torch.equal(engine.give_weights(), before)
    learned(engine)
