"""What to type where a GPU has too little memory for a model: by its call, its engine and what it has yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_lightning.workers.role import Role

_DIVIDED = "--strategy hybrid3d with --strategy.parallel.t and --strategy.parallel.generate.t above 1"
_LARGER = "larger GPUs, since here each holds all of the actor to generate"


def savings_of(role: Role, method: str) -> list[str]:
    """What takes less memory in the calls of a method, or in its `build`.

    Args:
        role: a model on a worker, whose engine may not be there yet.
        method: the name of what failed.
    """
    config, builds, answers = role.settings.training, method == "build", "sequences" in method
    engine, name = role.binding.engine, role.worker.role
    if engine is not None and engine.memory_owner is not engine:
        name = "actor"  # whose weights it computes with: in another type it would be loaded beside them
    found = savings_of_model(role, method, option=f"--algo.{name}")
    if not answers and not builds:
        found.append(
            f"--{config.option}.max_tokens_per_micro_batch below {config.micro_batch_tokens(on_cpu=False)}"
        )
        if config.kept_tokens:
            found.append(f"--{config.option}.kept_tokens below {config.kept_tokens}")
    found += config.savings(role.worker.layout, changes=role.weights_change, generates=answers)
    if answers and not config.takes_sizes:
        found += [_LARGER] if role.lora else [_DIVIDED, _LARGER]
    return found


def savings_of_model(role: Role, method: str, *, option: str) -> list[str]:
    """Of these the ones that every engine has.

    Args:
        role: see `savings_of`.
        method: see `savings_of`.
        option: what users type before the name of an option of the model.
    """
    settings, found = role.settings, list[str]()
    builds, updates = method == "build", method.startswith(("update", "accumulate"))
    if "sequences" in method:
        found.append((settings.vllm if settings.generator == "vllm" else settings.generate).fewer)
    elif (updates or _keeps(role, method)) and not role.gradient_checkpointing:
        found.append(f"{option}.gradient_checkpointing true")
    if role.computes_in == "float32" and not (builds and role.weights_change):  # masters stay float32
        found.append(f"{option}.dtype bfloat16")
    return found


def _keeps(role: Role, method: str) -> bool:
    """Whether a method may keep activations for an update that follows."""
    return role.trains and method != "build" and bool(role.settings.training.kept_tokens)
