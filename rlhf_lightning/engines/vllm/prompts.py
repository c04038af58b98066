"""What vLLM is asked: prompts without padding, and how each is to be answered."""

from __future__ import annotations

from tensordict import TensorDict
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rlhf_lightning.engines.sampling import uniform
from rlhf_lightning.spec import Sampling

_BITS = 48
"""Of what `uniform` draws."""


def prompts(rows: TensorDict, *, positions: int, sampling: Sampling) -> list[list[int]]:
    """The token ids of every prompt.

    Args:
        rows: prompt_ids [B, P] int64, prompt_mask [B, P] bool, row_ids [B] int64.
        positions: most tokens of a prompt and its response.
        sampling: says how long a response may be.

    Raises:
        ValueError: a prompt is empty, or too long.
    """
    limit = positions - sampling.max_new_tokens
    if limit < 1:
        raise ValueError(
            f"sampling.max_new_tokens={sampling.max_new_tokens}: vLLM has {positions} positions, the"
            f" prompt's included. Try {positions // 2}."
        )
    found = [
        ids[mask].tolist() for ids, mask in zip(rows["prompt_ids"], rows["prompt_mask"].bool(), strict=True)
    ]
    for row_id, prompt in zip(rows["row_ids"].tolist(), found, strict=True):
        if not prompt:
            raise ValueError(f"row {row_id}: its prompt is empty. Give it a token, such as the start token.")
        if len(prompt) > limit:
            raise ValueError(
                f"row {row_id}: its prompt of {len(prompt)} tokens and sampling.max_new_tokens exceed vLLM's"
                f" {positions} positions. Drop prompts of more than {limit} tokens, or lower max_new_tokens."
            )
    return found


def requests(
    rows: TensorDict, *, sampling: Sampling, stops: tuple[int, ...], seed: int
) -> list[SamplingParams]:
    """How each row is answered: with a seed of its own, from logits already at the temperature.

    Args:
        rows: row_ids [B] int64.
        sampling: for all of them.
        stops: tokens that end a response.
        seed: of all draws.
    """
    # The place of a response's first token is 0: at -1 nobody else draws.
    numbers = uniform(seed, rows["row_ids"].cpu(), rows["row_ids"].new_full((), -1).cpu())
    return [
        SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=0.0 if sampling.temperature == 0 else 1.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=number,
            stop_token_ids=list(stops),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for number in (numbers * 2**_BITS).long().tolist()
    ]
