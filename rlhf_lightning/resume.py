"""What is set right in the state of a checkpoint before a run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


def recount_epochs(state: Mapping[str, object]) -> None:
    """Let a checkpoint of the end of an epoch or of the fit be as one of the iteration before.

    Lightning counts an epoch as ended where `max_steps` or an early stop ends the fit in its middle: whoever
    goes on would leave out its other rows. After a whole epoch the next one would have a single iteration.

    Args:
        state: of a checkpoint; the counts of its fit loop are changed.
    """
    loops = cast("Mapping[str, Mapping[str, Any]]", state.get("loops", {}))
    if "fit_loop" not in loops:
        return
    fit = loops["fit_loop"]
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    whole, processed = batches["is_last_batch"], epochs["total"]["processed"]
    iterating = batches["total"]["completed"] < batches["total"]["processed"]
    if not (whole if iterating else processed >= epochs["total"]["ready"] > 0):
        return
    left = int(not whole)
    ended = processed + iterating - left
    for name in ("total", "current"):
        epochs[name] = {"ready": ended + 1, "started": ended + left, "processed": ended, "completed": ended}
        batches[name]["completed"] = batches[name]["processed"] - 1
    batches["is_last_batch"] = False
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= not iterating
