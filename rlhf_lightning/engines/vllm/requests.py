"""How vLLM is asked to answer each prompt, and what it is answering now.

waiting rows --so many at once--> vLLM --a token a row and step--> what they said, ended or not
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rlhf_lightning.engines.ends import Ends, StopTexts
from rlhf_lightning.engines.prompts import Prompt
from rlhf_lightning.engines.sampling import uniform
from rlhf_lightning.spec import Sampling

_BITS = 48
"""Of what `uniform` draws."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What vLLM is to answer, row by row."""

    prompts: list[list[int]]
    """Tokens of each prompt, and of what was said to it before."""
    said: list[int]
    """How many of these were said before."""
    params: list[SamplingParams]
    """How each row is answered: with seeds of its own, from logits already at the temperature."""
    seeds: npt.NDArray[np.int64]
    """[B, R]: of the draw at each place of each response."""
    texts: StopTexts | None
    """What else ends a response."""

    @classmethod
    def of(
        cls, rows: TensorDict, prompts: Sequence[Prompt], *, sampling: Sampling, ends: Ends, seed: int
    ) -> Requests:
        """Ask for the rest of every row.

        Args:
            rows: row_ids [B] int64 and what was said before, as `begun` gives it.
            prompts: of the rows, without padding.
            sampling: for all of them.
            ends: of responses.
            seed: of all draws.
        """
        ids, said = rows["response_ids"].cpu().numpy(), rows["response_mask"].sum(1).tolist()
        numbers = uniform(seed, rows["row_ids"].cpu()[:, None], torch.arange(sampling.max_new_tokens))
        params = [
            SamplingParams(
                max_tokens=max(1, sampling.max_new_tokens - before),
                temperature=0.0 if sampling.temperature == 0 else 1.0,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=0,  # `Going` knows better before each draw
                stop_token_ids=ends.tokens(sampling),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for before in said
        ]
        whole = [[*p.tolist(), *row[:n].tolist()] for p, row, n in zip(prompts, ids, said, strict=True)]
        seeds = (numbers * 2**_BITS).long().numpy()
        return cls(prompts=whole, said=said, params=params, seeds=seeds, texts=ends.texts(sampling))

    def __len__(self) -> int:
        return len(self.prompts)


class Going:
    """Requests of which some are with vLLM.

    Args:
        engine: that answers.
        runner: of its model.
        requests: of all rows.
        rows: those that are answered, the first ones first.
        at_once: most rows with vLLM.
    """

    def __init__(
        self,
        engine: LLMEngine,
        runner: GPUModelRunner,
        requests: Requests,
        *,
        rows: Sequence[int],
        at_once: int,
    ) -> None:
        self._engine, self._runner, self._requests = engine, runner, requests
        self._waiting, self._at_once = deque(rows), at_once
        self.left: set[int] = set()
        """Rows that vLLM has."""

    def step(self) -> dict[int, CompletionOutput]:
        """One more token for every row that vLLM has; what those say in the end that have ended."""
        while self._waiting and len(self.left) < self._at_once:
            row = self._waiting.popleft()
            self.left.add(row)
            self._engine.add_request(
                str(row), tokens_input(self._requests.prompts[row]), self._requests.params[row]
            )
        assert self._engine.has_unfinished_requests()
        ended: dict[int, CompletionOutput] = {}
        for output in self._engine.step():
            assert isinstance(output, RequestOutput)
            ended[int(output.request_id)] = output.outputs[0]
        self.left -= ended.keys()
        if self._requests.texts is not None:
            ended |= self._taken(self._stopped(self._requests.texts))
        return ended

    def seed(self) -> None:
        """Before tokens are drawn: by the place of each in its response, so that it can be gone on with."""
        batch, width = self._runner.input_batch, self._requests.seeds.shape[1]
        for index, generator in batch.generators.items():
            name = batch.req_ids[index]
            row = _row(name)
            place = self._requests.said[row] + len(self._runner.requests[name].output_token_ids)
            generator.manual_seed(int(self._requests.seeds[row, min(place, width - 1)]))

    def _stopped(self, texts: StopTexts) -> set[int]:
        """Rows that have just completed a text that ends a response: without a tokenizer vLLM reads none."""
        new = {row: state.detokenizer.output_token_ids for row, state in self._states().items()}
        new = {row: tokens for row, tokens in new.items() if tokens}
        lasts = torch.tensor([tokens[-1] for tokens in new.values()], dtype=torch.int64)
        found = set()
        for row in compress(new, texts.may_end(lasts).tolist()):
            prompt, before = self._requests.prompts[row], self._requests.said[row]
            if texts.ended([*prompt[len(prompt) - before :], *new[row]]):
                found.add(row)
        return found

    def pause(self) -> dict[int, CompletionOutput]:
        """Take from vLLM what it has, between two steps, and say how far each row came."""
        return self._taken(self.left)

    def _taken(self, rows: AbstractSet[int]) -> dict[int, CompletionOutput]:
        """What these rows have said so far; vLLM has them no more."""
        states = self._states()
        said = {row: states[row]._new_completion_output([], None, None) for row in rows}
        self._engine.abort_request([str(row) for row in rows])
        self.left -= rows
        return said

    def _states(self) -> dict[int, RequestState]:
        """What vLLM notes of the rows that it has."""
        return {_row(name): state for name, state in self._engine.output_processor.request_states.items()}

    def break_off(self) -> None:
        """Forget requests without an answer, and keys and values that vLLM may only think it has computed."""
        if self.left:
            self._engine.abort_request([str(row) for row in self.left])
            self.left.clear()
            self._runner.execute_model_state = None
            self._engine.reset_prefix_cache()


def _row(name: str) -> int:
    """The row of a request, by vLLM's own name of it, which has something random behind a dash."""
    return int(name.partition("-")[0])
