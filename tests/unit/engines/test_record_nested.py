"""A record in which one row's prompt holds another's prompt and the beginning of its answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlhf_lightning.spec import Sampling
from tests.unit.engines.decoders import asked
from tests.unit.engines.test_record import generator, made, recomputes, written

SURE = Sampling(max_new_tokens=9, top_k=1)
BEGUN = 2
"""Tokens of the answer that the longer prompt holds."""


def nested(asked_for: TensorDict, answers: TensorDict) -> TensorDict:
    """The prompt of a row that stopped by itself, alone and with the first tokens of its answer."""
    lengths = answers["response_mask"].sum(1)
    row = int(((lengths > BEGUN + 1) & (lengths < SURE.max_new_tokens)).nonzero()[0, 0])
    prompt = asked_for["prompt_ids"][row][asked_for["prompt_mask"][row]]
    whole = torch.cat([prompt, answers["response_ids"][row, :BEGUN]])
    ids = torch.stack([torch.cat([torch.zeros(BEGUN, dtype=torch.int64), prompt]), whole])
    mask = torch.arange(len(whole)) >= torch.tensor([[BEGUN], [0]])
    columns = {"prompt_ids": ids, "prompt_mask": mask, "row_ids": torch.arange(2)}
    return TensorDict(columns, batch_size=2)


def test_logits_that_were_never_computed_are_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    engine, plain = made(path), made(path, kept=0)
    generate, prompts = generator(engine), asked(*range(1, 25))
    rows = generate(nested(prompts, generate(prompts, SURE)), SURE)
    fed = [
        torch.cat([r["prompt_ids"][r["prompt_mask"]], r["response_ids"][r["response_mask"]]]) for r in rows
    ]
    assert torch.equal(*fed), "both rows are the same tokens, of which each has other logits"
    for part, recorded in ((rows[:1], False), (rows[1:], True), (rows, False)):
        assert recomputes(engine, part, monkeypatch, plain) != recorded
