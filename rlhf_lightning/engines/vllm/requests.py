"""How vLLM is asked to answer each prompt."""

from __future__ import annotations

from tensordict import TensorDict
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rlhf_lightning.engines.sampling import uniform
from rlhf_lightning.spec import Sampling

_BITS = 48
"""Of what `uniform` draws."""


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
