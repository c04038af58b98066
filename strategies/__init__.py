"""Where it runs: one placement a file."""

if __name__ != "rlhf_lightning.strategies":
    raise ImportError(f"This folder is imported as 'rlhf_lightning.strategies', not as {__name__!r}.")

from rlhf_lightning.strategies.colocated import Colocated
from rlhf_lightning.strategies.split import Split
from rlhf_lightning.strategies.standalone import Standalone

DEFAULT = "colocated"
"""Short name of the strategy that runs where none is given."""

__all__ = ["DEFAULT", "Colocated", "Split", "Standalone"]
