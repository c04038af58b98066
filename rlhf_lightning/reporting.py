"""What loggers and tables get to see of an iteration: metrics, timings, memory, options and texts."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.parsing import save_hyperparameters
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.controller import GROUPS, ORIGINS, Batch, CallReport
from rlhf_lightning.data.sampler import INDEX_MASK
from rlhf_lightning.data.tokenizer import decoded
from rlhf_lightning.functional import (
    explained_variance,
    kl_estimate,
    masked_mean,
    part_metrics,
    rollout_metrics,
    row_totals,
    tied_share,
)
from rlhf_lightning.workers import (
    Actor,
    Judge,
    Reward,
    Role,
    whole_ids,
)

logger = logging.getLogger(__name__)

PER_TOKEN = ("kl", "values", "advantages")
"""Columns [B, R] that a table of samples shows where an algorithm explains them."""
_OPTIONS = tuple(
    name
    for kind in (LightningModule, LightningDataModule)
    for name in (kind.CHECKPOINT_HYPER_PARAMS_KEY, kind.CHECKPOINT_HYPER_PARAMS_TYPE)
)
"""Keys of a checkpoint under which what `save_hyperparameters` was given stands, and its type."""


def timings(reports: Sequence[CallReport]) -> dict[str, float]:
    """Seconds of each method (the slowest device's), and the peak memory of the fullest device."""
    spent: defaultdict[tuple[str, str, int], float] = defaultdict(float)
    for report in reports:
        spent[report.role, report.method, report.rank] += report.seconds
    numbers: dict[str, float] = {}
    for (role, method, _), seconds in spent.items():
        name = f"time/{role}.{method}_s"
        numbers[name] = max(numbers.get(name, 0.0), seconds)
    if reports:
        numbers["memory/device_gb"] = max(report.memory_bytes for report in reports) / 1e9
    return numbers


def throughput(numbers: Mapping[str, float], rows: Batch, *, seconds: float) -> dict[str, float]:
    """Seconds of an iteration, and tokens per second where the iteration reported its response tokens.

    Args:
        numbers: metrics of the iteration.
        rows: prompts of the iteration; their tokens are counted where `numbers` has no `prompt/tokens`.
        seconds: duration of the iteration.
    """
    found = {"time/step_s": seconds}
    if "response/tokens" in numbers:
        given = float(rows["prompt_mask"].sum()) * numbers.get("response/samples_per_prompt", 1.0)
        prompts = numbers.get("prompt/tokens", given)
        found["throughput/tokens_per_s"] = (numbers["response/tokens"] + prompts) / seconds
    return found


def config_as_dict(value: object) -> object:
    """A configuration as nested dictionaries, for loggers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: config_as_dict(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {str(key): config_as_dict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [config_as_dict(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def keep_options(algorithm: LightningModule) -> None:
    """Let loggers and checkpoints see the options of an algorithm.

    The algorithm's own `save_hyperparameters` would compare each of its fields with all of them together, to
    which an array has no answer.
    """
    algorithm._log_hyperparams = True
    save_hyperparameters(algorithm, config_as_dict(algorithm), given_hparams={})


def plain_options(checkpoint: Mapping[str, object]) -> dict[str, object]:
    """A checkpoint in which what was given to `save_hyperparameters` is plain: no run makes objects of it.

    A data module has its tokenizer there by habit, which no checkpoint can hold.
    """
    return {n: config_as_dict(value) if n in _OPTIONS else value for n, value in checkpoint.items()}


def texts(rows: Batch, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[object]]:
    """Prompts and responses as texts, a list of B each."""
    prompts = zip(rows["prompt_ids"], rows["prompt_mask"], strict=True)
    return {
        "prompts": list(decoded([ids[mask].tolist() for ids, mask in prompts], tokenizer)),
        "responses": list(decoded(whole_ids(rows), tokenizer)),
    }


def answers(rows: Batch, tokenizer: PreTrainedTokenizerBase) -> list[object]:
    """Responses as texts without special tokens, as reward functions read them."""
    return list(decoded(whole_ids(rows), tokenizer, skip_special_tokens=True))


def turn_texts(rows: Batch, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """Of each response the turns as texts without special tokens: actor, environment, actor, and so on."""
    found = []
    for ids, mask in zip(whole_ids(rows), rows["response_mask"].tolist(), strict=True):
        runs = groupby(zip(ids, mask, strict=False), key=itemgetter(1))  # ids end with the last turn
        spans = [[token for token, _ in run] for _, run in runs]
        found.append(decoded(spans, tokenizer, skip_special_tokens=True))
    return found


def row_numbers(rows: Batch) -> Tensor:
    """The place of each row in the data's `train_rows`, [B] int64, the same in every epoch.

    Args:
        rows: as the data gives them, or `answers_to` of that, also of answers to answers; a pair has the
            place of its first row, twice.
    """
    return next(rows[name] for name in (ORIGINS, GROUPS, "row_ids") if name in rows) & INDEX_MASK


def predicted(rows: Batch, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[object]]:
    """`prompts`, `responses` without special tokens and whether they were `truncated`, a list of B each."""
    found = texts(rows, tokenizer) | {"responses": answers(rows, tokenizer)}
    return found | {"truncated": rows["row_truncated"].tolist()}


def warn_of_skipped_steps(numbers: Mapping[str, float]) -> None:
    """Warn where an optimizer skipped its step because the gradient was not finite."""
    strange = [name for name, number in numbers.items() if not math.isfinite(number)]
    if any(name.endswith("/grad_norm") for name in strange):
        logger.warning("an optimizer step was skipped: %s not finite", ", ".join(strange))


def service_retries(roles: Mapping[str, Role]) -> dict[str, float]:
    """Repeated requests to reward services since the start: `<role>/retries` for roles that ask any."""
    asking = {n: r for n, r in roles.items() if isinstance(r, Judge) and r.asks_services}
    return {f"{name}/retries": float(sum(r.count_retries().fetch())) for name, r in asking.items()}


def part_names(roles: Mapping[str, Role]) -> tuple[str, ...]:
    """The names of what `score_parts` holds; none where there is a second reward, which may have made it."""
    rewards = {name: role for name, role in roles.items() if isinstance(role, Reward)}
    return rewards["reward"].parts if [*rewards] == ["reward"] else ()


def response_metrics(batch: Batch, *, actor: Actor, parts: Sequence[str]) -> dict[str, float]:
    """Metrics of an iteration's responses: rewards, ties, lengths and, where known, KL and value statistics.

    None of no rows, such as where a step has dropped every prompt.

    Args:
        batch: the responses, with the columns that an estimator adds, or with `scores` [B, R] alone, or
            without, where nothing has scored them.
        actor: the actor that gave them.
        parts: names of the parts that add up to each score: reward functions and the reward model.

    Raises:
        ValueError: the actor has not drawn all of them.
    """
    if not len(batch):
        return {}
    _check_drawn(batch)
    if "row_tokens" not in batch and "scores" in batch:
        batch |= row_totals(batch["scores"], batch["response_mask"])
    tokens = batch["row_tokens"] if "row_tokens" in batch else batch["response_mask"].sum(dim=1)
    scored = "row_scores" in batch
    found = rollout_metrics(batch["row_scores"] if scored else None, tokens, batch["row_truncated"])
    if GROUPS in batch:
        found["response/samples_per_prompt"] = len(batch) / len(batch[GROUPS].unique())
        tied = tied_share(batch["row_scores"], batch[GROUPS]) if scored else None
        found |= {} if tied is None else {"response/tied_prompts": tied}
    if "prompt_mask" in batch:
        found["prompt/tokens"] = float(batch["prompt_mask"].sum())
    if actor.environment is not None:
        found["response/turns"] = float(batch["row_turns"].float().mean())
    if len(parts) > 1 and "score_parts" in batch:
        found |= part_metrics(parts, batch["score_parts"])
    if "row_kl" in batch:
        found["actor/kl"] = float(masked_mean(batch["row_kl"], tokens > 0))
    if "row_errors" in batch:
        sums = ("row_tokens", "row_returns", "row_squares", "row_errors", "row_error_squares")
        found["critic/explained_variance"] = explained_variance({name: batch[name] for name in sums})
    if actor.recompute_log_probs:
        mask = batch["response_mask"]
        mismatch = kl_estimate(batch["rollout_log_probs"], batch["log_probs"], "k3", mask=mask)
        found["actor/mismatch_kl"] = float(masked_mean(mismatch, mask))
    return found


def _check_drawn(batch: Batch) -> None:
    """Refuse rows that are not all answers which an actor has drawn."""
    if "row_truncated" not in batch:
        raise ValueError(
            "rollout_metrics describes answers that the actor has drawn, and the batch has no "
            "'row_truncated', which generate_sequences makes. Where given answers stand beside them, score "
            "and describe the drawn ones before the two are joined."
        )


def per_token(rows: Batch, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[object]]:
    """The tokens of each response, and the columns of `PER_TOKEN` that there are, as lists of B lists."""
    mask, ids = rows["response_mask"], rows["response_ids"]
    columns: dict[str, list[object]] = {
        "tokens": [[tokenizer.decode([t]) for t in i[m].tolist()] for i, m in zip(ids, mask, strict=True)]
    }
    for name in PER_TOKEN:
        if name in rows:
            columns[name] = [v[m].tolist() for v, m in zip(rows[name], mask, strict=True)]
    return columns
