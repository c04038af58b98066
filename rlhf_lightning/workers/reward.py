"""The reward: what algorithms make the responses better at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.controller import DP, register
from rlhf_lightning.data.tokenizer import load_tokenizer, token_texts
from rlhf_lightning.functional import at_last_valid
from rlhf_lightning.rewards import step_ends
from rlhf_lightning.workers.actor import SEQUENCES
from rlhf_lightning.workers.judge import Judge, nothing
from rlhf_lightning.workers.naming import naming_judge
from rlhf_lightning.workers.retelling import Retelling
from rlhf_lightning.workers.role import Role

SCORED = ("scores", "score_parts")


@dataclass(frozen=True, kw_only=True)
class CutOff:
    """Takes a penalty from the scores of responses that were cut off."""

    penalty: float
    columns: ClassVar[tuple[str, ...]] = ("row_truncated",)

    def __call__(self, scores: Tensor, rows: TensorDict) -> Tensor:
        """The scores [B, R] float32, less at the last valid token of such responses."""
        return scores - at_last_valid(self.penalty * rows["row_truncated"].float(), rows["response_mask"])


@dataclass(frozen=True, kw_only=True)
class Reward(Judge, Role):
    """Scores responses with functions, a reward model, or both; the field `reward` may be told neither."""

    per_token: Literal["outcome", "steps"] = "outcome"  # noqa: S105
    """What the model scores: the whole response at its last token, or each step at the step's last token."""
    separator: str = "\n"
    """What stands between steps; a step ends at the token in which it ends, and at the last token."""
    step_activation: Literal["sigmoid", "none"] = "sigmoid"
    """What makes a step's score of the model's number, which is a logit where it learned from labels."""
    step_weight: float = 1.0
    """Weight of a step's score beside the functions' outcome."""
    truncated_penalty: float = 0.0
    """Taken from the score of each answer that was cut off, without an end token, after `clip`."""

    def check(self) -> None:
        """See `Judge.check`.

        Raises:
            ValueError: a value is outside its range, or steps are to be scored without a model.
        """
        super().check()
        if self.scores_steps and not self.path:
            raise ValueError(
                "reward.per_token=steps: a model scores the steps, and this reward has none. Type "
                "--algo.reward.path DIRECTORY, that of a process reward model, or "
                "--algo.reward.per_token outcome."
            )
        if not (self.scores_steps or self.scores_by_itself):
            for name in ("separator", "step_activation", "step_weight"):
                if (given := getattr(self, name)) != getattr(Reward, name):
                    raise ValueError(
                        f"reward.{name}={given!r}: nothing reads it, as no model scores steps. Type "
                        "--algo.reward.per_token steps, or leave it out."
                    )
        if not self.separator:
            raise ValueError("reward.separator='': nothing stands between steps. Try a line break.")
        if self.truncated_penalty < 0:
            raise ValueError(
                f"reward.truncated_penalty={self.truncated_penalty}: it is taken from the score, and is not "
                f"negative. Type {-self.truncated_penalty}."
            )

    def arguments(self, method: str) -> Mapping[str, object]:
        """See `Remote.arguments`: `compute_reward` gets the penalty of answers that were cut off."""
        penal = self.truncated_penalty and method == "compute_reward"
        return {"cut_off": CutOff(penalty=self.truncated_penalty)} if penal else {}

    @property
    def retelling(self) -> Retelling | None:
        """As of every judge; but steps end in the actor's tokens, and a model of steps reads these."""
        return None if self.scores_steps else super().retelling

    @property
    def scores_steps(self) -> bool:
        """Whether the model scores each step."""
        return self.per_token == "steps"  # noqa: S105

    @register(transfer=DP, reads=(*SEQUENCES, "rows"), returns=SCORED)
    def compute_reward(self, rows: TensorDict, *, cut_off: CutOff | None = None) -> TensorDict:
        """Scores [B, R] float32: the outcome at the last valid token, those of steps where each step ends.

        Beside them score_parts [B, K] float32: each response's unweighted score by each of the K `parts`, the
        sum over its steps where the model scores these; NaN where one does not score it.

        Args:
            rows: prompts and responses, and the raw rows.
            cut_off: what to take from responses that were cut off; by default by `truncated_penalty`.

        Raises:
            ValueError: a function failed, or returned a wrong number of scores or one that is not finite.
        """
        judged = steps = None
        if self.scores_steps:
            steps = self.engine.infer(rows, temperature=1.0)["values"].cpu()
        elif self.path:
            judged = self.judged(self.engine, rows)
        if not self.worker.gives_output:  # functions and services are asked once a replica
            return nothing(rows, *SCORED)
        with naming_judge(self.worker.role or self.kind, self.kind):
            scores, parts = self.outcomes(rows, judged)
            if steps is not None:
                steps = self._steps(rows, steps)
                scores = scores + self.step_weight * steps
                parts = torch.cat([parts, steps.sum(dim=1, keepdim=True)], dim=1)
            scores = self.limited(scores, rows)
        found = {"scores": scores if cut_off is None else cut_off(scores, rows), "score_parts": parts}
        return TensorDict(found, batch_size=rows.batch_size)

    def _steps(self, rows: TensorDict, values: Tensor) -> Tensor:
        """Unweighted scores [B, R] float32 of the steps, 0 where none ends; from `values` [B, R] float32."""
        tokenizer = load_tokenizer(self.tokenizer)
        mask = rows["response_mask"]
        kept = [ids[valid].tolist() for ids, valid in zip(rows["response_ids"], mask, strict=True)]
        pieces = token_texts({*chain(*kept)}, tokenizer)
        ends = torch.zeros_like(mask)
        for row, ids in enumerate(kept):
            places = mask[row].nonzero().flatten()
            ends[row, places[step_ends([pieces[i] for i in ids], self.separator)]] = True
        scored = torch.sigmoid(values) if self.step_activation == "sigmoid" else values
        return torch.where(ends, scored, 0.0)
