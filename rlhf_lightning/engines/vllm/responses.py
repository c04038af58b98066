"""Converts vLLM's outputs to the columns that a generation engine returns.

n is the number of rows, B of all rows, R the width of the responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from vllm import CompletionOutput


def responses(found: list[CompletionOutput], *, width: int, pad: int) -> TensorDict:
    """The columns that `GenerationEngine.generate` returns."""
    ids = torch.full((len(found), width), pad, dtype=torch.int64)
    log_probs = torch.zeros(len(found), width)
    mask = torch.zeros(len(found), width, dtype=torch.bool)
    for row, output in enumerate(found):
        length = len(output.token_ids)
        ids[row, :length] = torch.tensor(output.token_ids)
        mask[row, :length] = True
        chosen = [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)]
        log_probs[row, :length] = torch.tensor(chosen)
    columns = {"response_ids": ids, "response_mask": mask, "log_probs": log_probs}
    return TensorDict(columns, batch_size=[len(found)])


def begun_responses(rows: TensorDict, *, pad: int) -> TensorDict:
    """A copy on the host of the responses so far, as `resume` returns them if nothing is added."""
    found = rows.select("response_ids", "response_mask", "log_probs", "ended").cpu().clone()
    found["response_ids"].masked_fill_(~found["response_mask"], pad)
    return found


def add(found: TensorDict, outputs: Mapping[int, CompletionOutput], before: Sequence[int]) -> None:
    """Append outputs, by row, to the responses in `found`, which had `before` tokens."""
    for row, more in outputs.items():
        start, width = before[row], found["response_ids"].shape[1]
        for name, values in responses([more], width=width - start, pad=0).items():
            length = len(more.token_ids)
            found[name][row, start : start + length] = values[0, :length]
