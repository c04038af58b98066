"""Checks of an algorithm before any worker starts: its fields, data, models and rewards."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from rlhf_lightning.data import row_data, second_data
from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.engines import (
    check_head,
    check_language,
    check_model,
    check_packed,
    explaining_positions,
    has_tokenizer,
    max_positions,
    num_tokens,
    on_hub,
    padding_token,
    resolve,
)
from rlhf_lightning.field_types import check_names, check_types
from rlhf_lightning.functional import PolicyLoss
from rlhf_lightning.optimizer import warn_of_slow_adapters
from rlhf_lightning.options import factory
from rlhf_lightning.rewards import Environment, preflight
from rlhf_lightning.spec import ModelSpec, OptimizerSpec
from rlhf_lightning.stepping import is_own
from rlhf_lightning.tokenizer_checks import check_tokenizers
from rlhf_lightning.workers import Actor, Generator, Judge, Opponent, Reward, Role
from rlhf_lightning.workers.naming import naming_judge, naming_role

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rlhf_lightning.algorithm import RLHFAlgorithm
    from rlhf_lightning.data.rows import Row

logger = logging.getLogger(__name__)


def check_fields(algorithm: RLHFAlgorithm) -> None:
    """Refuse values of wrong types, roles that no strategy would place, unread optimizers, empty loops."""
    check_types(algorithm)
    _check_names(algorithm)
    roles = algorithm.roles()
    _check_actors(type(algorithm).__name__, roles)
    _check_stray_roles(algorithm)
    _check_optimizers(roles)
    _check_directories(roles)
    for name, least, why in (
        ("epochs", 1, "nothing would be learned"),
        ("mini_batch_size", 0, "nothing would be learned"),
        ("critic_warmup_steps", 0, "is not a number of iterations"),
        ("reward_kl_coef", 0, "what leaves the reference would be rewarded"),
        ("stop_kl", 0, "no divergence is below 0, so the actor would pause after each first step"),
        ("multiplier_lr", 0, "the cost would weigh less where it is too high"),
    ):
        given = vars(algorithm).get(name)
        if given is not None and given < least:
            raise ValueError(f"{name}={given}: {why}. Give at least {least}.")


def _check_names(algorithm: RLHFAlgorithm) -> None:
    """Refuse one text where the algorithm or a loss of it names columns, models or metrics."""
    kind = type(algorithm).__name__
    check_names(kind, "needs", algorithm.needs)
    check_names(kind, "validates", algorithm.validates)
    check_names(kind, "progress", algorithm.progress)
    for loss in algorithm.loss_fields().values():
        check_names(type(loss).__name__, "columns", loss.columns)


def _check_stray_roles(algorithm: RLHFAlgorithm) -> None:
    """Refuse roles that are not the value of a field: no strategy would find them."""
    kind = type(algorithm)
    fields = [field.name for field in dataclasses.fields(cast("DataclassInstance", algorithm))]
    inherited = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    for name, value in (inherited | vars(algorithm)).items():
        if isinstance(value, Role) and name not in fields:
            role = type(value).__name__
            raise ValueError(
                f"{kind.__name__}.{name} is not a field, so nothing places it. Write `{name}: {role} = "
                f"field(default_factory={role})` in the class, with the type."
            )
        if name.startswith("_hparams"):  # what the user's own save_hyperparameters() has copied
            continue
        several = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list | tuple) and any(isinstance(item, Role) for item in several):
            raise ValueError(
                f"{kind.__name__}.{name} holds roles in a {type(value).__name__}, where nothing places them. "
                "Give each a field of its own."
            )


def _check_optimizers(roles: Mapping[str, Role]) -> None:
    for name, role in roles.items():
        if not role.trains and role.optimizer != OptimizerSpec():
            raise ValueError(
                f"{name}.optimizer: nothing trains this model, so nothing reads it. Leave it out."
            )


def _check_directories(roles: Mapping[str, Role]) -> None:
    """Refuse a path that is no directory: the data, read before models, would speak of its tokenizer."""
    for name, role in roles.items():
        if role.path and not on_hub(found := role.located()):
            with naming_role(name):
                resolve(found)


def _check_actors(owner: str, roles: Mapping[str, Role]) -> None:
    actors = [name for name, role in roles.items() if isinstance(role, Actor)]
    if actors and "actor" not in roles:
        raise ValueError(
            f"{owner} has no field called actor, and answers as {' and '.join(actors)}. Call one of them "
            "actor: it answers held-out prompts, its tokenizer reads the data, metrics are of its answers."
        )
    if isinstance(roles.get("actor"), Opponent):
        raise ValueError(f"{owner}.actor: an Opponent follows the field actor. Give that an Actor.")


def check_roles(algorithm: RLHFAlgorithm, *, generates: bool) -> None:
    """Refuse models, tokenizers, an environment or a correction that cannot work; warn of slow adapters.

    Args:
        algorithm: its roles have paths and seeds.
        generates: whether the actor generates answers, rather than reading given ones.
    """
    if algorithm.trainer.state.fn == "fit":
        _warn_of_rates(algorithm)
    _check_models(algorithm, generates=generates)
    _check_opponents(algorithm)
    check_tokenizers(algorithm)
    _check_answers_fit(algorithm)
    _check_environment(algorithm)
    _check_correction(algorithm)


def _warn_of_rates(algorithm: RLHFAlgorithm) -> None:
    roles, made = algorithm.roles(), dataclasses.fields(cast("DataclassInstance", algorithm))
    usual = {f.name: make() for f in made if f.name in roles and callable(make := factory(f))}
    warn_of_slow_adapters(roles, usual)


def _check_models(algorithm: RLHFAlgorithm, *, generates: bool) -> None:
    """Refuse models that are missing or damaged, or too short for the rows."""
    data, main = row_data(algorithm.trainer), algorithm.main_model
    task = algorithm.trainer.state.fn
    predicts = task == "predict"
    if predicts:
        _ = algorithm.main_actor
    new_tokens = main.sampling.max_new_tokens if isinstance(main, Actor) else 0
    for name, role in algorithm.roles().items():
        if not role.path:
            continue
        with naming_role(name):
            check_model(role)
            check_packed(role, role.head)
            if role.head == "lm":
                check_language(role)
            elif task == "fit" or role.needed_to_validate or name in algorithm.validates:  # it is built
                check_head(role)
        if isinstance(role, Actor):
            _check_stops(name, role)
        retold = role.own_tokens or (isinstance(role, Judge) and role.retelling)
        positions = None if retold else max_positions(role)
        if data is not None and positions is not None:
            with explaining_positions(role):
                own = role.sampling if isinstance(role, Opponent) else None
                draws, most = generates or bool(own), own.max_new_tokens if own else new_tokens
                for part in filter(None, (data, second_data(algorithm.trainer))):
                    answers = draws and part is data
                    part.check_lengths(positions=positions, new_tokens=most, generates=answers)
                given = generates and algorithm.draws and "response_ids" in algorithm.needs
                if given and not predicts:
                    data.check_lengths(positions=positions, new_tokens=most, generates=False)


def _check_opponents(algorithm: RLHFAlgorithm) -> None:
    """Refuse an opponent that begins as another model and would become the actor."""
    for name, role in algorithm.roles().items():
        if isinstance(role, Opponent) and role.weights_change and role.path != algorithm.main_model.path:
            raise ValueError(
                f"{name}.path={role.path!r} with {name}.decay={role.decay}: it is another model than the "
                f"actor, whose weights it would take on. Type --algo.{name}.decay null, with which it stays "
                f"as it is, or leave {name}.path out."
            )


def _check_answers_fit(algorithm: RLHFAlgorithm) -> None:
    """Refuse a `vllm.max_model_len` that is too short for the longest prompt and its answer."""
    data, main, strategy = row_data(algorithm.trainer), algorithm.main_model, algorithm.strategy
    if data is None or not isinstance(main, Actor):
        return
    copies = [name for name, role in strategy.models().items() if isinstance(role, Generator)]
    settings = strategy.settings_of(copies[0] if copies else "actor")
    limit = settings.vllm.max_model_len
    if settings.generator != "vllm" or not limit:
        return
    drawing = [main, *(role for role in algorithm.roles().values() if isinstance(role, Opponent))]
    prompt = data.longest_prompt
    answer = max(role.sampling.max_new_tokens for role in drawing)
    if prompt + answer > limit:
        raise ValueError(
            f"strategy.settings.vllm.max_model_len={limit}: the longest prompt has {prompt} tokens, and "
            f"sampling.max_new_tokens={answer} come behind it. Try {prompt + answer}, or 0 for all positions "
            "of the model."
        )


def _check_correction(algorithm: RLHFAlgorithm) -> None:
    """Refuse losses that compare two log-probabilities of drawn answers where there is only one.

    A step of the user's own may compute another one for a loss of the user's own.
    """
    for name, loss in algorithm.loss_fields().items():
        corrected = isinstance(loss, PolicyLoss) and loss.correction
        both = {"log_probs", "rollout_log_probs"} <= {*loss.columns} and not algorithm.reads_only
        makes_both = not corrected and is_own(type(algorithm).step)
        if both and not makes_both and not algorithm.main_actor.recompute_log_probs:
            whose = f"{name}.correction" if corrected else f"{name}={type(loss).__name__}"
            raise ValueError(
                f"{whose}: compares two log-probabilities of the answers, and there is one. "
                "Try --algo.actor.recompute_log_probs true."
            )


def _check_stops(name: str, actor: Actor) -> None:
    """Refuse stop tokens that the model does not have."""
    size, stops = num_tokens(actor), actor.sampling.stop_token_ids
    if size is not None and stops and max(stops) >= size:
        raise ValueError(
            f"{name}.sampling.stop_token_ids={list(stops)}: the model has the tokens 0 to {size - 1}. Leave "
            f"{max(stops)} out."
        )


def check_judges(algorithm: RLHFAlgorithm) -> None:
    """Check rewards and costs, and try their functions on the first rows, and on the first held-out rows.

    Those that no step calls are tried on held-out rows alone.

    Warns of data sources in `by_source` that no row has, and of models that pad rows with their end token.

    Raises:
        ValueError: an option cannot be, nothing says what one scores, or a function does not exist or work.
    """
    read = _rows_in_use(algorithm)
    sources = {str(row.get("data_source", "")) for rows in read for row in rows}
    for name, judge in algorithm.placed().items():
        if isinstance(judge, Judge):
            with naming_judge(name, judge.kind):
                judge.check()
                if not _is_told(judge) and judge.scores_by_itself:
                    continue
                _check_told(name, judge)
                for rows in read[1:] if name in algorithm.uncalled() else read:
                    preflight(judge.spec, rows)
            _warn_of_padding(name, judge)
            unknown = sorted(set(judge.spec.by_source) - sources)
            if unknown and sources:
                there = ", ".join(sorted(sources)[:5])
                logger.warning(
                    "%s.by_source: no row is of %s; there are %s.", name, ", ".join(unknown), there
                )


def _is_told(judge: Judge) -> bool:
    return bool(judge.path or judge.functions or judge.by_source)


def _check_told(name: str, judge: Judge) -> None:
    """Refuse a judge that is not told what it scores: the field `reward` alone has a default."""
    if name != "reward" and not _is_told(judge):
        known = "too_long" if judge.kind == "cost" else "exact_match"
        raise ValueError(
            f"{name}: it has neither functions nor a model, and there is no default. Type "
            f"--algo.{name}.functions {known} (or your own, such as mypackage.mymodule.myfunction), or "
            f"--algo.{name}.path DIRECTORY, that of a {judge.kind} model."
        )


def _warn_of_padding(name: str, judge: Judge) -> None:
    """Warn of a model of whole answers that transformers would read before the end token, not at it."""
    model = ModelSpec(path=judge.path)
    if not judge.path or not has_tokenizer(model) or (isinstance(judge, Reward) and judge.scores_steps):
        return
    tokenizer = load_tokenizer(judge.path)
    if (pad := padding_token(model)) is not None and pad == tokenizer.eos_token_id:
        logger.warning(
            "%s.path=%r: its config.json pads rows with the end token %r (pad_token_id=%d). transformers "
            "reads the number of an answer at the token before that; it is read at the end token here. If "
            "the model was trained elsewhere, take one that has a padding token of its own.",
            name, judge.path, tokenizer.eos_token, pad,
        )  # fmt: skip


def check_validation(algorithm: RLHFAlgorithm) -> None:
    """Refuse to validate without a reward, for algorithms that score held-out answers with one."""
    data = row_data(algorithm.trainer)
    if data and data.held_out_rows and algorithm.trainer.limit_val_batches:
        _ = algorithm.main_reward


def _check_environment(algorithm: RLHFAlgorithm) -> None:
    """Try environments, of actors or for single calls, on the first rows, and on the first held-out rows.

    Raises:
        ValueError: one does not exist, or does not work.
    """
    of_actors = [role.environment for role in algorithm.roles().values() if isinstance(role, Actor)]
    for environment in (*of_actors, *vars(algorithm).values()):
        if isinstance(environment, Environment):
            for rows in _rows_in_use(algorithm):
                environment.try_out(rows)


def _rows_in_use(algorithm: RLHFAlgorithm) -> list[list[Row]]:
    """The training rows, and the held-out rows if there is validation; empty for an unknown data module."""
    data, trainer = row_data(algorithm.trainer), algorithm.trainer
    if data is None:
        return []
    validated = data.held_out_rows if trainer.limit_val_batches or trainer.state.fn == "validate" else []
    return [data.train_rows, *([validated] if validated else [])]
