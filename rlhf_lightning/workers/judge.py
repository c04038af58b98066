"""What reward and cost share: a response is scored by functions, services and a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Self, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.controller import ONE_TO_ALL, Batch, Remote, Worker, register
from rlhf_lightning.controller.register import methods_of
from rlhf_lightning.data.record import are_messages
from rlhf_lightning.data.tokenizer import decoded, end_tokens, load_tokenizer, reads
from rlhf_lightning.engines import Head, TrainEngine, has_tokenizer, located, max_positions, num_tokens
from rlhf_lightning.functional import at_last_valid, last_valid, row_ends
from rlhf_lightning.rewards import (
    RETRIES,
    SCHEMES,
    Functions,
    HTTPOptions,
    Kind,
    RewardSpec,
    Sources,
    find,
    function_names,
    not_finite,
    score,
)
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.workers.actor import Actor
from rlhf_lightning.workers.naming import found_before, naming_judge
from rlhf_lightning.workers.retelling import ReadsTo, Retelling

_OF_MODELS = ("dtype", "gradient_checkpointing", "lora", "reads_to")
"""Options of a judge that say how its model computes and what it reads."""


@dataclass(frozen=True, kw_only=True)
class Judge(Remote):
    """The options of a role that scores, beside those of its model.

    Raises:
        ValueError: workers cannot import a function.
    """

    path: str = ""
    """A sequence-classification directory with one output; no model where empty."""
    functions: Functions = None
    """A function's name, dotted path or http address, a list of them, or a mapping of them to weights."""
    by_source: Sources = field(default_factory=dict)
    """Mapping of data source to functions, in the same forms; they score such rows instead of `functions`."""
    tokenizer: str = ""
    """The actor's where empty; it turns ids into the texts that functions read."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens at which the actor stops beside its end tokens; those of its sampling where there are none."""
    reads_to: ReadsTo = "template"
    """Where a model with another tokenizer than the actor's has its score: `template`, at the end of its chat
    template; `end`, at the token that ends the last turn, as models trained here: the template may go on."""
    http: HTTPOptions = field(default_factory=HTTPOptions)
    """How functions that are services are asked."""
    clip: float | None = None
    """Scores are limited to this, and to minus this."""
    head: ClassVar[Head] = "reward"
    needed_to_validate: ClassVar[bool] = True
    kind: ClassVar[Kind] = "reward"
    """Whether its scores are rewards or costs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", function_names(self.functions, option=f"{self.kind}.functions"))
        option = f"{self.kind}.by_source"
        named = {
            source: function_names(functions, option=option) for source, functions in self.by_source.items()
        }
        object.__setattr__(self, "by_source", named)

    @property
    def scores_by_itself(self) -> bool:
        """Whether its class has a method of the user's own in place of `compute_reward` or `compute_cost`."""
        name = f"compute_{self.kind}"
        owner = next(kind for kind in type(self).__mro__ if name in vars(kind))
        return not owner.__module__.startswith(__package__)

    @property
    def reads_prompts(self) -> bool:
        """Whether `compute_reward` or `compute_cost` reads prompts, without which no model runs."""
        reads = methods_of(type(self))[f"compute_{self.kind}"].reads
        return reads is None or "prompt_ids" in reads

    def check(self) -> None:
        """Refuse options that cannot be, before any worker starts, once the name of its field is known."""
        if self.clip is not None and not self.clip > 0:
            raise ValueError(
                f"{self.kind}.clip={self.clip}: no score is left. Give a positive number, such as 5."
            )
        for name in () if self.path or self.scores_by_itself else _OF_MODELS:
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{self.kind}.{name}: nothing reads it, as no model scores. Type --algo.{self.kind}.path "
                    f"DIRECTORY, that of a {self.kind} model, or leave it out."
                )

    @property
    def spec(self) -> RewardSpec:
        """The functions and their weights."""
        model = ModelSpec(path=self.path) if self.path else None
        return RewardSpec(
            functions=self.functions, by_source=self.by_source, model=model, http=self.http, kind=self.kind
        )

    @property
    def asks_services(self) -> bool:
        """Whether one of the functions is a service."""
        return any(name.startswith(SCHEMES) for name in self.spec.names())

    def following(self, actor: ModelSpec) -> Self:
        """A copy with the actor's tokenizer and stop tokens where it has none of its own."""
        stops = actor.sampling.stop_token_ids if isinstance(actor, Actor) else ()
        return replace(
            self, tokenizer=self.tokenizer or actor.path, stop_token_ids=self.stop_token_ids or tuple(stops)
        )

    def located(self) -> Self:
        """A copy with absolute paths."""
        return replace(self, path=located(self.path), tokenizer=located(self.tokenizer))

    def build(self, worker: Worker) -> None:
        """Find the functions on this node, of which else the first scores would tell; then load the model."""
        if worker.gives_output:
            with naming_judge(worker.role or self.kind, self.kind), found_before():
                find(self.spec)
        super().build(worker)  # type: ignore[safe-super]

    @register(transfer=ONE_TO_ALL, computes=False)
    def count_retries(self) -> int:
        """Repeated requests to services of this role, counted from the start of each rank's process."""
        return sum(RETRIES[name] for name in self.spec.names())

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of what adds up to a score: the functions, then `model` where there is one."""
        return (*self.spec.names(), *(("model",) if self.path else ()))

    @property
    def retelling(self) -> Retelling | None:
        """Re-encodes responses where the model has another tokenizer; None where it reads the actor's ids."""
        return _retelling(self.path, self.tokenizer, self.reads_to) if self.path else None

    def judged(self, engine: TrainEngine, rows: TensorDict) -> Tensor:
        """The model's score at the last token of each response: [B] float32 on the host, 0 for an empty one.

        Args:
            engine: holds the model.
            rows: prompts and responses (`SEQUENCES`), and the raw rows.
        """
        rows = rows if self.retelling is None else self.retold(rows, self.retelling)
        values = engine.infer(rows, temperature=1.0)["values"].cpu()
        return last_valid(values, rows["response_mask"])

    def retold(self, rows: TensorDict, retelling: Retelling) -> TensorDict:
        """Prompts and responses in the model's own tokens; see `Retelling.rows`."""
        ids, raw = whole_ids(rows), _raw(rows)
        alone = self._texts(ids)
        behind = self._texts_behind(rows, ids, alone)
        texts = [
            (one if are_messages(row.get("prompt_messages")) else other) if kept else None
            for row, kept, one, other in zip(raw, ids, alone, behind, strict=True)
        ]
        ends = {*end_tokens(self.tokenizer), *self.stop_token_ids}
        return retelling.rows(raw, texts, ended=[kept[-1:] != [] and kept[-1] in ends for kept in ids])

    def outcomes(self, rows: TensorDict, judged: Tensor | None) -> tuple[Tensor, Tensor]:
        """Score whole responses.

        Args:
            rows: response_ids [B, R] int64, response_mask [B, R] bool, and the raw rows.
            judged: [B] float32, the model's scores; None without a model.

        Returns:
            [B, R] float32: the score at the last valid token, 0 elsewhere; and [B, K] float32: the unweighted
            score by each of the K `parts`, NaN in rows that it does not score.

        Raises:
            ValueError: a function failed, or returned a wrong number of scores or one that is not finite.
        """
        mask, raw = rows["response_mask"], _raw(rows)
        prompts = [str(row["prompt"]) for row in raw]
        columns = score(self.spec, prompts, self._texts(whole_ids(rows)), raw)
        scores = torch.tensor(columns.pop("scores"), dtype=torch.float32)
        parts = [torch.tensor(column, dtype=torch.float32) for column in columns.values()]
        if judged is not None:
            parts.append(judged)
            scores = scores + judged
        table = torch.stack(parts, dim=1) if parts else scores.new_empty(len(raw), 0)
        return at_last_valid(scores, mask), table

    def _texts(self, ids: list[list[int]]) -> list[str]:
        """Decode responses without special tokens."""
        return decoded(ids, load_tokenizer(self.tokenizer), skip_special_tokens=True)

    def _texts_behind(self, rows: TensorDict, ids: list[list[int]], alone: list[str]) -> list[str]:
        """Decode responses as they follow their prompts: alone, a tokenizer may drop a leading space."""
        pairs = zip(rows["prompt_ids"], rows["prompt_mask"], strict=True)
        prompts = [every[mask].tolist() for every, mask in pairs]
        wholes = self._texts([[*prompt, *kept] for prompt, kept in zip(prompts, ids, strict=True)])
        texts = zip(self._texts(prompts), wholes, alone, strict=True)
        return [
            whole.removeprefix(before) if whole.startswith(before) else one for before, whole, one in texts
        ]

    def limited(self, scores: Tensor, rows: TensorDict) -> Tensor:
        """The scores [B, R] float32 within `clip`.

        Raises:
            ValueError: the model gave one that is not finite, which estimators would take into other rows.
        """
        found = scores if self.clip is None else scores.clamp(-self.clip, self.clip)
        if strange := (~found.isfinite()).nonzero().tolist():
            row, value = strange[0][0], float(found[tuple(strange[0])])
            raise not_finite(
                f"{self.kind}.path={self.path!r}",
                value,
                row,
                prompt=str(_raw(rows)[row]["prompt"]),
                advice="The model is damaged, or its numbers too large for its type: try "
                f"--algo.{self.kind}.dtype float32.",
            )
        return found


@lru_cache(maxsize=8)
def _retelling(path: str, tokenizer: str, reads_to: ReadsTo) -> Retelling | None:
    model = ModelSpec(path=path)
    if reads_ids(model, of=ModelSpec(path=tokenizer)):
        return None
    return Retelling(tokenizer=load_tokenizer(path), positions=max_positions(model), reads_to=reads_to)


def reads_ids(model: ModelSpec, *, of: ModelSpec) -> bool:
    """Whether a model can read another's token ids: it has no tokenizer, or one with the same numbers."""
    if model.path == of.path or not has_tokenizer(model):
        return True
    return reads(of.path, model.path, my_vocab=num_tokens(of), their_vocab=num_tokens(model))


def _raw(rows: TensorDict) -> list[dict[str, object]]:
    return cast(list[dict[str, object]], list(rows.get("rows").tolist()) if len(rows) else [])


def whole_ids(rows: TensorDict | Batch) -> list[list[int]]:
    """The response ids of each row up to its last True in the mask, an environment's tokens included."""
    ends = row_ends(rows["response_mask"]).tolist()
    return [ids[:end].tolist() for ids, end in zip(rows["response_ids"], ends, strict=True)]


def nothing(rows: TensorDict, *names: str) -> TensorDict:
    """Columns of zeros [B, R] float32, for ranks whose output is not collected."""
    zeros = torch.zeros(rows["response_mask"].shape, dtype=torch.float32)
    return TensorDict(dict.fromkeys(names, zeros), batch_size=rows.batch_size)
