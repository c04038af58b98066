"""RLHF as a dataflow of large models on a stock Lightning Trainer, with interchangeable placements."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["RLHFAlgorithm", "Strategy", "__version__"]
_MODULES = {"RLHFAlgorithm": "algorithm", "Strategy": "strategy"}

if TYPE_CHECKING:
    from rlhf_lightning.algorithm import RLHFAlgorithm
    from rlhf_lightning.strategy import Strategy
else:

    def __getattr__(name: str) -> type:
        """Import the two classes to begin with when they are asked for: Lightning is slow to import."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return vars(import_module(f"{__name__}.{_MODULES[name]}"))[name]


def __dir__() -> list[str]:
    """What a prompt completes, also what is not imported yet."""
    return sorted({*globals(), *__all__})
