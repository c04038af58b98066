"""A stand-in that Lightning sees in place of the models' own optimizers; a warning of their rates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch.optim import Optimizer

from rlhf_lightning.engines.optimizer import learning_rate
from rlhf_lightning.spec import OptimizerSpec
from rlhf_lightning.workers import Role

logger = logging.getLogger(__name__)

SLOW_LR = 2e-5
"""Below it fresh adapters hardly learn."""


def warn_of_slow_adapters(roles: Mapping[str, Role], usual: Mapping[str, object]) -> None:
    """Warn of fresh adapters whose rate nobody chose: Adam moves B from 0 by about the rate in each step.

    Args:
        roles: of the algorithm.
        usual: its fields by default.
    """
    for name, role in roles.items():
        default = usual.get(name)
        rates = {OptimizerSpec().lr, default.optimizer.lr if isinstance(default, Role) else 0.0}
        is_fresh = role.trains and role.lora is not None and not role.lora.path
        if is_fresh and role.optimizer.lr in rates and role.optimizer.lr < SLOW_LR:
            logger.warning(
                "%s.lora with optimizer.lr=%g: adapters begin at 0, and hardly move at the rate of whole "
                "models. Try --algo.%s.optimizer.lr 1e-4.", name, role.optimizer.lr, name
            )  # fmt: skip


class RemoteOptimizer(Optimizer):
    """Counts iterations for `global_step`, and shows LearningRateMonitor its numbers; updates nothing.

    It has one parameter group for each trained role, named after it. The rate shown is that of the last
    optimizer step; before any step, that of the first. Where nothing is trained, it has one that stands for
    nothing: torch refuses an optimizer without any.

    Args:
        trained: the optimizer options of each trained role.
    """

    def __init__(self, trained: Mapping[str, OptimizerSpec]) -> None:
        groups = [
            {
                "params": [torch.nn.Parameter(torch.empty(0))],
                "name": name,
                "lr": learning_rate(spec, 0),
                "betas": spec.betas,
                "weight_decay": spec.weight_decay,
            }
            for name, spec in (trained or {"nothing": OptimizerSpec(lr=0.0)}).items()
        ]
        super().__init__(groups, {"betas": ()})  # by which LearningRateMonitor looks for a momentum

    def show(self, rates: Mapping[str, float]) -> None:
        """Take over the learning rates that the roles report."""
        for group in self.param_groups:
            group["lr"] = rates.get(group["name"], group["lr"])

    def state_dict(self) -> dict[str, object]:
        """The rates that it shows; the engines save their optimizers."""
        return {"rates": {group["name"]: group["lr"] for group in self.param_groups}}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Show the rates of the checkpoint."""
        self.show(cast("Mapping[str, float]", state_dict["rates"]))

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the models' own optimizers have stepped already. Lightning counts the call."""
