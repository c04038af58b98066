"""Our WorkerGroup: a DP echo chained through Batch columns, and a ONE_TO_ALL ping."""

import dataclasses
import json

from exchange import Exchange, Timing, from_command_line


def measure(exchange: Exchange) -> Timing:
    """Start `exchange.workers` workers on this machine, measure, stop them.

    An echo has to reach the worker's method as tensors, and what it returns has to be stored as a new output,
    so that both systems move the same bytes. A chain ends when the last call has ended; nothing is fetched.
    """
    raise NotImplementedError("ours_dispatch.measure: waits for the controller")


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(from_command_line()))))
