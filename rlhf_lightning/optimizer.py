"""A stand-in that Lightning sees in place of the optimizers, which live with the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch.optim import Optimizer

from rlhf_lightning.engines.optimizer import learning_rate
from rlhf_lightning.spec import OptimizerSpec


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
        """Show the rates of the checkpoint; those of earlier versions have none."""
        self.show(cast("Mapping[str, float]", state_dict.get("rates", {})))

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the models' own optimizers have stepped already. Lightning counts the call."""
