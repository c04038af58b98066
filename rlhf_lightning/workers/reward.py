"""The reward: functions of the texts, a model, or both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.controller import DP, Worker, register
from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.engines import Head, located
from rlhf_lightning.functional import at_last_valid, last_valid
from rlhf_lightning.rewards import RewardSpec, score
from rlhf_lightning.workers.actor import SEQUENCES
from rlhf_lightning.workers.role import Role


@dataclass(frozen=True, kw_only=True)
class Reward(Role):
    """Scores responses with functions (`exact_match` unless told otherwise), a reward model, or both."""

    path: str = ""
    """A sequence-classification directory with one output; no model where empty."""
    functions: dict[str, float] | list[str] | str | None = None
    """A function's name or dotted path, a list of them, or a mapping of function to weight."""
    by_source: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mapping of data source to {function: weight}; such rows are scored by these instead of `functions`."""
    tokenizer: str = ""
    """The actor's where empty; it turns ids into the texts that functions read."""
    head: ClassVar[Head] = "reward"
    evaluates: ClassVar[bool] = True

    @property
    def spec(self) -> RewardSpec:
        """The functions and their weights."""
        model = self if self.path else None
        return RewardSpec(functions=self.functions, by_source=self.by_source, model=model)

    def following(self, actor: Role) -> Self:
        """The same reward with the actor's tokenizer where it names none."""
        return self if self.tokenizer else replace(self, tokenizer=actor.path)

    def located(self) -> Self:
        """The same reward with absolute paths."""
        return replace(super().located(), tokenizer=located(self.tokenizer))

    def build(self, worker: Worker) -> None:
        """Load the model, where there is one."""
        if self.path:
            super().build(worker)
        else:
            self.place.worker = worker

    def offload(self) -> None:
        """Free the device of the model, where there is one."""
        if self.path:
            super().offload()

    def reload(self) -> None:
        """Bring it back."""
        if self.path:
            super().reload()

    @register(transfer=DP, reads=(*SEQUENCES, "rows"), returns=("scores",))
    def compute_reward(self, rows: TensorDict) -> TensorDict:
        """Scores [B, R] float32: the outcome at the last valid token, 0 elsewhere.

        Raises:
            ValueError: a function failed, or returned a wrong number of scores or one that is not finite.
        """
        mask = rows["response_mask"]
        scores = self._function_scores(rows)
        if self.path:
            scores = scores + last_valid(self.engine.infer(rows, temperature=1.0)["values"].cpu(), mask)
        return TensorDict({"scores": at_last_valid(scores, mask)}, batch_size=rows.batch_size)

    def _function_scores(self, rows: TensorDict) -> Tensor:
        tokenizer = load_tokenizer(self.tokenizer)
        ids, mask = rows["response_ids"].tolist(), rows["response_mask"].tolist()
        kept = [
            [i for i, m in zip(row, valid, strict=True) if m] for row, valid in zip(ids, mask, strict=True)
        ]
        responses = tokenizer.batch_decode(kept, skip_special_tokens=True)
        raw = cast(list[dict[str, object]], _objects(rows, "rows"))
        prompts = [str(row["prompt"]) for row in raw]
        return torch.tensor(score(self.spec, prompts, responses, raw)["scores"], dtype=torch.float32)


def _objects(rows: TensorDict, name: str) -> list[object]:
    return list(rows.get(name).tolist()) if len(rows) else []
