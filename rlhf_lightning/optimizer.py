"""What Lightning sees of the optimizers that live with the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.optim import Optimizer


class RemoteOptimizer(Optimizer):
    """Counts iterations for `global_step`, shows learning rates to LearningRateMonitor, updates nothing.

    One parameter group stands for each trained role, named after it.
    """

    def __init__(self, rates: Mapping[str, float]) -> None:
        groups = [
            {"params": [torch.nn.Parameter(torch.empty(0))], "name": n, "lr": r} for n, r in rates.items()
        ]
        super().__init__(groups, {"lr": 0.0})

    def show(self, rates: Mapping[str, float]) -> None:
        """Take over the learning rates that the roles report."""
        for group in self.param_groups:
            group["lr"] = rates.get(group["name"], group["lr"])

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: the models have stepped where they are."""
