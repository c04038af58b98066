"""The rows that a generation starts from: prompts without padding, and the responses begun before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

Prompt = np.ndarray[tuple[int], np.dtype[np.int64]]
"""The token ids of one prompt, without padding."""


def check_together(rows: Mapping[str, Tensor], what: Literal["prompt", "response"]) -> None:
    """Refuse ids beside the mask of other ones.

    Args:
        rows: with prompt_ids, prompt_mask [n, P] or response_ids, response_mask [n, R].
        what: which of them.
    """
    ids, mask = ([*rows[f"{what}_{name}"].shape] for name in ("ids", "mask"))
    if ids != mask:
        made = "prompt_columns(texts, tokenizer)" if what == "prompt" else "the call that made them"
        raise ValueError(
            f"{what}_ids are {ids} and {what}_mask {mask}: they belong together. Take both from {made}."
        )


def read_prompts(
    rows: TensorDict, *, positions: int, new_tokens: int, owner: str, advice: str = ""
) -> list[Prompt]:
    """The token ids of every prompt, without padding.

    Args:
        rows: prompt_ids [B, P] int64, prompt_mask [B, P] bool, row_ids [B] int64.
        positions: most tokens of a prompt and its response.
        new_tokens: most tokens of a response.
        owner: the model or engine that has the positions, for errors.
        advice: a sentence about how it would have more of them, for errors.

    Raises:
        ValueError: a prompt is empty, or too long, or the mask is that of other prompts.
    """
    check_together(cast("Mapping[str, Tensor]", rows), "prompt")
    limit = positions - new_tokens
    if limit < 1:
        said = (
            f"sampling.max_new_tokens={new_tokens}: {owner} has {positions} positions, the prompt's included."
            f" Try {positions // 2}. {advice}"
        )
        raise ValueError(said.rstrip())
    ids, masks = rows["prompt_ids"].long().cpu().numpy(), rows["prompt_mask"].bool().cpu().numpy()
    prompts = [row[mask] for row, mask in zip(ids, masks, strict=True)]
    for row_id, prompt in zip(rows["row_ids"].tolist(), prompts, strict=True):
        if not len(prompt):
            raise ValueError(f"row {row_id}: its prompt is empty. Give it a token, such as the start token.")
        if len(prompt) > limit:
            said = (
                f"row {row_id}: its prompt of {len(prompt)} tokens and sampling.max_new_tokens exceed the"
                f" {positions} positions that {owner} has. Drop prompts of more than {limit} tokens, and"
                f" let `step` make none, as of answers so far, or lower max_new_tokens. {advice}"
            )
            raise ValueError(said.rstrip())
    return prompts


def begun(rows: TensorDict, *, width: int) -> TensorDict:
    """The rows with the response of each so far: columns of empty responses are added where there are none.

    Args:
        rows: [B] rows; those that were begun before have `response_ids`, `response_mask`, `log_probs` [B, R]
            and `ended` [B] bool, as `GenerationEngine.resume` returns them.
        width: R, most tokens of a response.

    Raises:
        ValueError: responses were begun with another R.
    """
    if "ended" not in rows:
        nothing = torch.zeros(len(rows), width, device=rows["prompt_ids"].device)
        empty = {"response_ids": nothing.long(), "response_mask": nothing.bool(), "log_probs": nothing}
        empty["ended"] = empty["response_mask"].any(1)
        return TensorDict({**rows, **empty}, batch_size=[len(rows)])
    if (found := rows["response_ids"].shape[1]) != width:
        raise ValueError(
            f"sampling.max_new_tokens={width}: the responses were begun with {found}. Continue with {found}."
        )
    return rows
