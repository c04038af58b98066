"""What vLLM says, as the columns of our batches.

n rows, B rows in all, R the width of the responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from vllm import CompletionOutput


def responses(found: list[CompletionOutput], *, width: int, pad: int) -> TensorDict:
    """The columns that `generate` returns."""
    ids = torch.full((len(found), width), pad, dtype=torch.int64)
    log_probs = torch.zeros(len(found), width)
    mask = torch.zeros(len(found), width, dtype=torch.bool)
    for row, said in enumerate(found):
        length = len(said.token_ids)
        ids[row, :length] = torch.tensor(said.token_ids)
        mask[row, :length] = True
        chosen = [at[token].logprob for at, token in zip(said.logprobs, said.token_ids, strict=True)]
        log_probs[row, :length] = torch.tensor(chosen)
    columns = {"response_ids": ids, "response_mask": mask, "log_probs": log_probs}
    return TensorDict(columns, batch_size=[len(found)])


def begun_responses(rows: TensorDict, *, pad: int) -> TensorDict:
    """What `resume` returns of rows that go no further: in memory of its own on the host."""
    said = rows.select("response_ids", "response_mask", "log_probs", "ended").cpu().clone()
    said["response_ids"].masked_fill_(~said["response_mask"], pad)
    return said


def add(found: TensorDict, said: Mapping[int, CompletionOutput], before: Sequence[int]) -> None:
    """Write what rows have said behind what they had said before."""
    for row, more in said.items():
        start, width = before[row], found["response_ids"].shape[1]
        for name, values in responses([more], width=width - start, pad=0).items():
            length = len(more.token_ids)
            found[name][row, start : start + length] = values[0, :length]
