"""A generation that hands over its rows as they end: all of them once, the same answers, the longest last."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.fsdp.engine import FSDPEngine
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.engines.native.engine import NativeEngine
from rlhf_lightning.engines.native.fused import decoder_of
from rlhf_lightning.engines.native.generator import NativeGenerator
from rlhf_lightning.engines.packed.attention import use_interface
from rlhf_lightning.parallel.shares import shares
from rlhf_lightning.spec import Sampling
from tests.unit.engines import tiny
from tests.unit.engines.decoders import agree, decoder, table, token_lists
from tests.unit.engines.test_native import LENGTHS, PAD, STOPS

SAMPLING = Sampling(max_new_tokens=13)


def generator(config: Native | None = None, *, kind: str = "llama") -> NativeGenerator:
    module = decoder(kind)
    use_interface(module)
    ends = Ends(pad_token_id=PAD, eos_token_ids=STOPS)
    return NativeGenerator(decoder_of(module), device="cpu", ends=ends, config=config)


def finished(
    native: NativeGenerator, rows: TensorDict, parts: int
) -> tuple[list[list[int]], list[TensorDict]]:
    found: list[tuple[Tensor, TensorDict]] = list(
        native.finished(rows, sampling=SAMPLING, seed=5, parts=parts)
    )
    return [which.tolist() for which, _ in found], [answers for _, answers in found]


@pytest.mark.parametrize("parts", [1, 3, 7, 9])
@pytest.mark.parametrize("config", [Native(), Native(slots=2, refill=1)], ids=["at once", "slots"])
def test_each_row_is_in_one_part_and_answers_as_ever(config: Native, parts: int) -> None:
    native, rows = generator(config), table(token_lists(LENGTHS))
    whole = native.generate(rows, sampling=SAMPLING, seed=5)
    which, answers = finished(native, rows, parts)
    assert [len(part) for part in which] == shares(len(rows), parts)
    order = [row for part in which for row in part]
    assert sorted(order) == list(range(len(rows)))
    assert all(part == sorted(part) for part in which)
    agree(torch.cat(answers), whole[torch.tensor(order)])  # type: ignore[arg-type]


def test_parts_come_in_the_order_of_their_lengths() -> None:
    native, rows = generator(), table(token_lists([5] * 12))
    lengths = [part["response_mask"].sum(1) for part in finished(native, rows, 4)[1]]
    assert lengths[0].max() < lengths[-1].min()
    for before, after in pairwise(lengths):
        assert before.max() <= after.min()


def test_a_part_is_handed_over_before_the_others_are_decoded() -> None:
    native, rows = generator(kind="mistral"), table(token_lists(LENGTHS))
    forwards: list[int] = []
    module = native.decoder.module  # type: ignore[attr-defined]
    hook = module.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: forwards.append(ids[0].shape[1])
    )
    going = native.finished(rows, sampling=SAMPLING, seed=5, parts=3)
    for _, answers in going:
        assert len(forwards) == int(answers["response_mask"].sum(1).max())
        assert torch.is_grad_enabled()
        assert not answers["log_probs"].requires_grad
    hook.remove()
    # Every row is fed its prompt and all that it says but the last: once, however often it is handed over.
    said = native.generate(rows, sampling=SAMPLING, seed=5)["response_mask"].sum(1)
    assert sum(forwards) == sum(LENGTHS) + int((said - 1).sum())


def test_parts_of_no_rows_are_empty() -> None:
    which, answers = finished(generator(), table([]), 2)
    assert which == [[], []]
    assert [part["response_ids"].shape for part in answers] == [(0, 13), (0, 13)]


class Watched(FSDPEngine):
    """An engine that looks, as generation ends, whether its decoder is held still."""

    held: bool | None = None

    @contextmanager
    def generating(self) -> Iterator[Decoder]:
        with super().generating() as decoder:
            alive = weakref.ref(decoder)
            try:
                yield decoder
            finally:
                del decoder
                self.held = alive() is not None


@pytest.mark.parametrize("parts_read", [1, 3])
def test_nothing_holds_the_decoder_where_a_generation_is_left(tmp_path: Path, parts_read: int) -> None:
    source = Watched(tiny.spec(tiny.write_causal(tmp_path)))
    ends = Ends(pad_token_id=PAD, eos_token_ids=STOPS)
    native = NativeEngine(source, seat=tiny.SEAT, ends=ends, config=Native())
    going = native.finished(table(token_lists(LENGTHS)), sampling=SAMPLING, seed=5, parts=3)
    for _ in range(parts_read):
        next(going)
    del going  # closes it
    assert source.held is False
