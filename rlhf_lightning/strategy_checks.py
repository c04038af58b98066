"""Checks of a strategy before any worker starts, of runs that would lose their result, or have not ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from lightning.pytorch.trainer.states import TrainerStatus

from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.controller.cluster import num_devices, num_gpus
from rlhf_lightning.field_types import check_names, check_types
from rlhf_lightning.output import keepers, keeps_last
from rlhf_lightning.workers import Actor
from rlhf_lightning.workers.naming import naming_role

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from rlhf_lightning.algorithm import RLHFAlgorithm
    from rlhf_lightning.strategy import Strategy
    from rlhf_lightning.workers import Role


logger = logging.getLogger(__name__)

RUNNING = TrainerStatus.RUNNING
_BEGUN = WeakSet["Strategy"]()
"""Those of this process that have begun a run."""


def release(strategy: Strategy) -> None:
    """Release devices that earlier runs hold: where a callback's `on_exception` raises, Lightning does not.

    Args:
        strategy: that begins a run, and may have left such itself.
    """
    for other in [*_BEGUN]:
        if other.transport is None and other._cluster is None:
            continue
        trainer = other.algorithm._trainer
        runs = trainer is not None and trainer.strategy is other and trainer.state.status == RUNNING
        if other is strategy or not runs:  # else a callback of that run has begun this one
            other.teardown()
    _BEGUN.add(strategy)


def check_options(strategy: Strategy) -> None:
    """Refuse values of wrong types, no devices or time, other engines, and offloading that does nothing."""
    check_types(strategy, name="strategy")
    if strategy.devices is not None and strategy.devices < 1:
        raise ValueError(f"strategy.devices={strategy.devices}: a job needs at least 1 device.")
    if strategy.timeout_s <= 0:
        raise ValueError(f"strategy.timeout_s={strategy.timeout_s}: must be above 0. Try 1800.")
    if strategy.offload and not strategy.makes_room:
        raise ValueError(
            f"{type(strategy).__name__}(offload=True): every model has devices of its own, and makes room "
            "for no other. Leave it out, or try --strategy colocated --strategy.offload true."
        )
    settings = strategy.settings
    if strategy.engine is not None and settings.engine not in (None, strategy.engine):
        raise ValueError(
            f"strategy.settings.engine={settings.engine}: {strategy.strategy_name} trains with "
            f"{strategy.engine}. Leave the option out, or take another strategy."
        )
    if strategy.offload and settings.generator == "vllm" and not settings.vllm.sleep:
        raise ValueError(
            "strategy.settings.vllm.sleep=false with strategy.offload=true: vLLM is to keep its memory, and "
            "to make room for other models. Leave one of them out."
        )


def check_pools(strategy: Strategy, roles: Sequence[str], found: object) -> list[ResourcePool]:
    """What `place` has returned, as a list.

    Raises:
        ValueError: it is no pools, one has no whole number of devices, or not each role has its pool.
    """
    where = f"{type(strategy).__name__}.place"
    returned = list(found) if isinstance(found, Iterable) else [found]
    pools = [pool for pool in returned if isinstance(pool, ResourcePool)]
    if strange := [other for other in returned if not isinstance(other, ResourcePool)]:
        raise ValueError(
            f"{where}: returned {strange[0]!r} where a ResourcePool is wanted. Write return "
            '[ResourcePool("all", devices or 1, tuple(roles))], or several of them.'
        )
    check_placed([pool.roles for pool in pools], roles, where=where)
    if wrong := [pool for pool in pools if type(pool.num_devices) is not int or pool.num_devices < 1]:
        raise ValueError(
            f"{where}: the pool of {', '.join(wrong[0].roles)} has num_devices={wrong[0].num_devices!r}. "
            "Give it a whole number, at least 1 (// divides whole numbers)."
        )
    return pools


def check_placed(pools: Sequence[Sequence[str]], roles: Sequence[str], *, where: str) -> None:
    """Refuse pools that do not hold each role once, or hold what is none.

    Args:
        pools: the names in each pool.
        roles: names of the roles to place.
        where: what says so, for the error.
    """
    for pool in pools:
        check_names("ResourcePool", "roles", pool)
    named = [role for pool in pools for role in pool]
    if unknown := sorted(set(named) - set(roles)):
        raise ValueError(
            f"{where}: the algorithm has no {', '.join(unknown)} that a step would call. It has "
            f"{', '.join(roles)}. {left_out(unknown)}"
        )
    if missing := [role for role in roles if role not in named]:
        raise ValueError(
            f"{where}, pools of {', '.join(named) or 'nothing'}: lacks {', '.join(missing)}. Add each to one "
            "pool."
        )
    if twice := [role for role in roles if named.count(role) > 1]:
        raise ValueError(f"{where}: {', '.join(twice)} stand in two pools. Keep one.")


def left_out(names: Sequence[str]) -> str:
    """What to do about names in a placement that no step calls, as the end of an error."""
    why = " (where coefficients such as policy_loss.kl_coef are 0, nothing reads one)"
    return f"Leave {', '.join(names)} out{why if 'reference' in names else ''}."


def check_layouts(strategy: Strategy, roles: Mapping[str, Role], pools: Sequence[ResourcePool]) -> None:
    """Refuse models that their devices cannot be divided among, or whose kept passes are freed before use.

    Warns where the models do not take all devices.

    Raises:
        ValueError: a model does not divide so, or its engine cannot train it so; or a compiler is missing,
            `offload` frees what `kept_tokens` keeps, or vLLM is to sleep twice on a GPU.
    """
    _check_kept(strategy, roles, pools)
    _check_sleeping(strategy, roles, pools)
    _warn_of_idle(strategy, num_devices(pools))
    for pool in pools:
        for name in pool.roles:
            layout = strategy.layout(roles[name], name, pool.num_devices)
            if roles[name].path:
                settings = strategy.settings_of(name)
                settings.training.check_devices(gpu=num_gpus() > 0)
                with naming_role(name):
                    roles[name].check_layout(layout, settings)


def _warn_of_idle(strategy: Strategy, placed: int) -> None:
    """Warn of devices of the job on which no model is: the search of `auto`, too, may leave some."""
    if strategy.devices not in (None, placed):
        logger.warning(
            "strategy.devices=%d: %s.place puts the models on %d.",
            strategy.devices, type(strategy).__name__, placed,
        )  # fmt: skip


def _check_kept(strategy: Strategy, roles: Mapping[str, Role], pools: Sequence[ResourcePool]) -> None:
    """Refuse to keep passes where each call of another role frees them; on a GPU, a lack of room does."""
    if not strategy.offload or num_gpus():
        return
    trained = [name for pool in pools if len(pool.roles) > 1 for name in pool.roles if roles[name].trains]
    for name in trained:
        training = strategy.settings_of(name).training
        if training.kept_tokens:
            raise ValueError(
                f"{training.option}.kept_tokens={training.kept_tokens} with strategy.offload=true: on a "
                f"CPU every call of another role on the devices of {name} frees what is kept before the "
                "update takes it, and offloading saves no memory there. Leave strategy.offload out."
            )


def _check_sleeping(strategy: Strategy, roles: Mapping[str, Role], pools: Sequence[ResourcePool]) -> None:
    """Refuse two actors on one GPU whose vLLM sleeps: what it sleeps with, a process has once."""
    if not num_gpus():
        return
    for pool in pools:
        actors = [name for name in pool.roles if isinstance(roles[name], Actor)]
        chosen = {name: strategy.settings_of(name) for name in actors}
        asleep = [name for name, one in chosen.items() if one.generator == "vllm" and one.vllm.sleep]
        if len(asleep) > 1:
            two = "--strategy.settings.vllm.sleep false and room for two (under auto in given pools), "
            awake = "" if strategy.offload else two
            raise ValueError(
                f"strategy.settings.generator=vllm: {' and '.join(asleep)} answer on the same GPUs, and vLLM "
                f"can sleep once in a process. Type {awake}--strategy.settings.generator native, or "
                "--strategy standalone, which gives each GPUs of its own."
            )


def check_start(algorithm: RLHFAlgorithm) -> None:
    """Refuse models that a first run has trained, and incomplete ones."""
    _check_restart(algorithm)
    _check_set_up(algorithm)


def _check_restart(algorithm: RLHFAlgorithm) -> None:
    """Refuse a second run without a checkpoint: the models that the first one trained ended with it."""
    trainer, name, done = algorithm.trainer, type(algorithm).__name__, algorithm.iterations_here
    called = trainer.state.fn.value if trainer.state.fn else "fit"
    if done and not trainer.ckpt_path:
        raise ValueError(
            f"{name} was trained for {done} iterations in this process. Its models ended with that run's "
            f"devices, and would be those of their paths again. {_how_to_continue(trainer, called)}, or "
            f"give a new {name}(...)."
        )


def _check_set_up(algorithm: RLHFAlgorithm) -> None:
    """Refuse models that `RLHFAlgorithm.setup` has not completed: their seeds and paths would be wrong."""
    if algorithm.main_model.init_seed is None:
        raise ValueError(
            f"{type(algorithm).__name__}.setup leaves out what completes and checks the models. Begin it "
            "with super().setup(stage)."
        )


def _how_to_continue(trainer: Trainer, called: str) -> str:
    """What to type to continue from a checkpoint that the trainer's callbacks have kept."""
    if keeps_last(trainer):
        return f'Go on from the last checkpoint: trainer.{called}(..., ckpt_path="last")'
    if best := [keeper.best_model_path for keeper in keepers(trainer) if keeper.best_model_path]:
        return f'Go on from a checkpoint: trainer.{called}(..., ckpt_path="{best[-1]}")'
    return 'No checkpoint was kept: train with Trainer(callbacks=[LastCheckpoint("checkpoints")])'
