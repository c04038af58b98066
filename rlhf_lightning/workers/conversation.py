"""Responses of several turns: an environment replies between the turns of the actor.

        said by the actor          by the environment   and so on, up to R tokens in all
ids     12 * 7 = ? <end>           84 <end>             The answer is 84. <end>
mask    1  1 1 1 1 1               0  0                 1   1      1  1   1

B is the number of rows, R the width of the responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.tokenizer import encode_behind
from rlhf_lightning.engines import Ends, GenerationEngine
from rlhf_lightning.parallel import ModelGroups
from rlhf_lightning.parallel.groups import if_several
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers.in_hand import SAID


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A generation engine and an environment that take turns; all ranks of a model copy run it alike."""

    engine: GenerationEngine
    """Generates the actor's turns."""
    environment: Environment
    """Replies to them; only one rank of a copy asks it."""
    tokenizer: PreTrainedTokenizerBase
    """The actor's, which also encodes the replies."""
    ends: Ends
    """What ends a turn of the actor."""
    groups: ModelGroups | None = None
    """This rank's process groups; None where it has a copy of its own."""

    def answer(self, rows: TensorDict, *, sampling: Sampling, seed: int) -> TensorDict:
        """Answer every row, in as many turns as the environment asks for.

        A reply that would leave no room for another token is dropped: the response then counts as cut off.

        Args:
            rows: as for `GenerationEngine.generate`, and the raw `rows`.
            sampling: as for `GenerationEngine.generate`; R counts the tokens of actor and environment.
            seed: as for `GenerationEngine.generate`.

        Returns:
            What `GenerationEngine.generate` returns, `response_mask` being True at the actor's tokens only,
            `row_truncated` [B] bool, whether a response was cut off, and `row_turns` [B] int64.
        """
        prompts = rows.select("prompt_ids", "prompt_mask", "row_ids")

        def speak(said: TensorDict) -> TensorDict:
            begun = TensorDict({**prompts, **said}, batch_size=rows.batch_size)
            return self.engine.resume(begun, sampling=sampling, seed=seed, pause=lambda _: False)

        with self.engine.weights_held():
            said = speak(TensorDict({}, batch_size=rows.batch_size))
            context = torch.zeros_like(said["response_mask"])
            cut = self._cut_off(said, sampling)
            going, turns = ~cut, torch.ones(len(rows), dtype=torch.int64)
            for _ in range(self.environment.turns - 1):
                replies = self._replies(rows, said, going)
                going = torch.tensor([reply is not None for reply in replies], dtype=torch.bool)
                cut |= going & (said["response_mask"].sum(1) + _lengths(replies) >= context.shape[1])
                going &= ~cut
                if not bool(going.any()):
                    break
                _append(said, context, replies, going)
                turns += going
                said = speak(said)
                cut |= (full := self._cut_off(said, sampling))
                going &= ~full
        found = said.select(*SAID)
        found["response_mask"] = found["response_mask"] & ~context
        found["row_truncated"], found["row_turns"] = cut, turns
        return found

    def _cut_off(self, said: TensorDict, sampling: Sampling) -> Tensor:
        """[B] bool, responses that reached R tokens before the actor's turn ended."""
        return self.ends.cut_off(said["response_ids"], said["response_mask"], sampling=sampling)

    def _replies(self, rows: TensorDict, said: TensorDict, going: Tensor) -> list[list[int] | None]:
        """The environment's replies as tokens; None where it has none, or where `going` [B] is False."""
        replies: list[list[int] | None] = [None] * len(rows)
        chosen, groups = going.nonzero()[:, 0].tolist(), self._shared()
        if chosen and all(dist.get_rank(group) == 0 for group in groups):
            raw = cast(list[dict[str, object]], rows.get("rows").tolist())
            picked = [raw[row] for row in chosen]
            pairs = zip(said["response_ids"][going], said["response_mask"][going], strict=True)
            responses = self.tokenizer.batch_decode([ids[mask].tolist() for ids, mask in pairs])
            texts = self.environment.replies([str(row["prompt"]) for row in picked], responses, picked)
            for row, text in zip(chosen, texts, strict=True):
                replies[row] = None if text is None else self._encoded(text)
        for group in groups:
            every = [replies]
            dist.broadcast_object_list(every, group=group, group_src=0)
            replies = every[0]
        return replies

    def _encoded(self, text: str) -> list[int]:
        """A reply as tokens: with none, nothing would tell the turns before and after it apart."""
        if not (tokens := encode_behind(text, self.tokenizer)):
            raise ValueError(
                f"environment {self.environment.name}: returned {text!r}, which has no token for "
                "the actor. Return another text, or None where the response is complete."
            )
        return tokens

    def _shared(self) -> list[dist.ProcessGroup]:
        """The groups of the ranks that share a copy: broadcasts in them, in this order, reach all ranks."""
        if self.groups is None:
            return []
        found = map(if_several, (self.groups.generation_pipeline, self.groups.generation_tensor))
        return [group for group in found if group is not None]


def _lengths(replies: list[list[int] | None]) -> Tensor:
    return torch.tensor([len(reply or ()) for reply in replies], dtype=torch.int64)


def _append(said: TensorDict, context: Tensor, replies: list[list[int] | None], going: Tensor) -> None:
    """Append the replies to the responses that go on, and mark them in `context` [B, R] bool."""
    lengths = said["response_mask"].sum(1).tolist()
    for row in going.nonzero()[:, 0].tolist():
        tokens = replies[row] or []
        place = slice(lengths[row], lengths[row] + len(tokens))
        said["response_ids"][row, place] = torch.tensor(tokens, dtype=torch.int64)
        said["response_mask"][row, place] = context[row, place] = True
    said["ended"] = ~going
