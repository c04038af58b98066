"""The requests to vLLM: one per row, some of them running at a time.

waiting rows ── at most `at_once` ──> vLLM, a token per row and step ──> outputs, finished or paused
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
from rlhf_lightning.engines.sampling import BITS, uniform
from rlhf_lightning.spec import Sampling


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The requests for B rows."""

    prompts: list[list[int]]
    """Tokens of each prompt and of the response so far."""
    begun: list[int]
    """Number of tokens of each response so far; they are the last of its `prompts`."""
    params: list[SamplingParams]
    """vLLM's sampling parameters; logits are divided by the temperature before."""
    seeds: npt.NDArray[np.int64]
    """[B, R]: seeds of the draws at all positions of all responses."""
    texts: StopTexts | None
    """Texts that end a response, beside the tokens that do."""

    @classmethod
    def of(
        cls, rows: TensorDict, prompts: Sequence[Prompt], *, sampling: Sampling, ends: Ends, seed: int
    ) -> Requests:
        """Request the rest of every row's response.

        Args:
            rows: row_ids [B] int64 and the responses so far, as `begun` returns them.
            prompts: of the rows, without padding.
            sampling: for all rows.
            ends: what ends a response.
            seed: of all draws.
        """
        ids, begun = rows["response_ids"].cpu().numpy(), rows["response_mask"].sum(1).tolist()
        numbers = uniform(seed, rows["row_ids"].cpu()[:, None], torch.arange(sampling.max_new_tokens))
        params = [
            SamplingParams(
                max_tokens=max(1, sampling.max_new_tokens - before),
                temperature=0.0 if sampling.temperature == 0 else 1.0,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=0,  # `RunningRequests.seed` replaces it before each draw
                stop_token_ids=ends.tokens(sampling),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for before in begun
        ]
        whole = [[*p.tolist(), *row[:n].tolist()] for p, row, n in zip(prompts, ids, begun, strict=True)]
        seeds = (numbers * 2**BITS).long().numpy()
        return cls(prompts=whole, begun=begun, params=params, seeds=seeds, texts=ends.texts(sampling))

    def __len__(self) -> int:
        return len(self.prompts)


class RunningRequests:
    """Runs requests in vLLM, a limited number at a time.

    Args:
        engine: vLLM's engine.
        runner: vLLM's model runner.
        requests: of all rows.
        rows: the rows to answer, in this order.
        at_once: most rows that vLLM has at a time.
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
        """Rows that vLLM has now."""

    def step(self) -> dict[int, CompletionOutput]:
        """Add waiting rows, draw a token for every row in vLLM, and return the outputs of finished rows."""
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
        """Seed the next draw of every row by its position in the response, so a pause changes no draw."""
        batch = self._runner.input_batch
        for index, generator in batch.generators.items():
            name = batch.req_ids[index]
            row = _row(name)
            place = self._requests.begun[row] + len(self._runner.requests[name].output_token_ids)
            generator.manual_seed(int(self._requests.seeds[row, place]))

    def _stopped(self, texts: StopTexts) -> set[int]:
        """Rows that have just completed a stop text, which vLLM, having no tokenizer, cannot find."""
        new = {row: state.detokenizer.output_token_ids for row, state in self._states().items()}
        new = {row: tokens for row, tokens in new.items() if tokens}
        lasts = torch.tensor([tokens[-1] for tokens in new.values()], dtype=torch.int64)
        found = set()
        for row in compress(new, texts.may_end(lasts).tolist()):
            prompt, before = self._requests.prompts[row], self._requests.begun[row]
            if texts.ended([*prompt[len(prompt) - before :], *new[row]]):
                found.add(row)
        return found

    def pause(self) -> dict[int, CompletionOutput]:
        """Remove all rows from vLLM, between two steps, and return their outputs so far."""
        return self._taken(self.left)

    def _taken(self, rows: AbstractSet[int]) -> dict[int, CompletionOutput]:
        """Remove rows from vLLM, and return their outputs so far."""
        states = self._states()
        outputs = {row: states[row]._new_completion_output([], None, None) for row in rows}
        self._drop(rows)
        return outputs

    def _drop(self, rows: AbstractSet[int]) -> None:
        """Remove rows from vLLM, each by itself: several it would free in an order that each process draws.

        The order decides which keys and values are evicted first, and so what the ranks of a copy schedule.
        """
        for row in sorted(rows):
            self._engine.abort_request([str(row)])
        self.left -= rows

    def _states(self) -> dict[int, RequestState]:
        """VLLM's state of each row that it has."""
        return {_row(name): state for name, state in self._engine.output_processor.request_states.items()}

    def abort(self) -> None:
        """Abort unfinished requests, and clear the prefix cache, whose entries may not have been computed."""
        if self.left:
            self._drop(self.left)
            self._runner.execute_model_state = None
            self._engine.reset_prefix_cache()


def _row(name: str) -> int:
    """The row of a request by vLLM's internal name of it, which is the row, a dash and a random suffix."""
    return int(name.partition("-")[0])
