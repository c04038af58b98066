"""Ray alone, the bound of both systems: actors that echo NumPy arrays, and a ping.

An echo returns the four arrays of its rows as they were mapped, so that nothing but the object store's own
copy is left: in one object a worker ("one object") or in one an array ("object a column").
"""

import dataclasses
import json
import statistics
import time

import numpy as np
import numpy.typing as npt
import ray
from exchange import Exchange, Timing
from turns import turns

Arrays = list[npt.NDArray[np.int64]]


class Echo:
    """A worker that returns what it gets."""

    def together(self, arrays: Arrays) -> Arrays:
        """Arrays in one object."""
        return arrays

    def apart(self, *arrays: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
        """Arrays in an object each."""
        return arrays

    def ping(self) -> int:
        """Return a number."""
        return 0


def shares(exchange: Exchange) -> list[Arrays]:
    """The arrays of each worker."""
    rows = exchange.rows // exchange.workers
    values = np.arange(rows * exchange.width, dtype=np.int64).reshape(rows, exchange.width)
    return [[values + index for index in range(exchange.columns)] for _ in range(exchange.workers)]


def together_s(actors: list, exchange: Exchange) -> float:  # type: ignore[type-arg]  # Ray's handles have no type
    """Seconds of one of `exchange.calls` chained echoes, one object a worker."""
    refs = [ray.put(arrays) for arrays in shares(exchange)]
    start = 0.0
    for call in range(exchange.calls + 1):
        refs = [actor.together.remote(ref) for actor, ref in zip(actors, refs, strict=True)]
        if call == 0:
            ray.wait(refs, num_returns=len(refs), fetch_local=False)
            start = time.perf_counter()
    ray.wait(refs, num_returns=len(refs), fetch_local=False)
    return (time.perf_counter() - start) / exchange.calls


def apart_s(actors: list, exchange: Exchange) -> float:  # type: ignore[type-arg]
    """The same, one object a worker and array."""
    methods = [actor.apart.options(num_returns=exchange.columns) for actor in actors]
    refs = [[ray.put(array) for array in arrays] for arrays in shares(exchange)]
    start = 0.0
    for call in range(exchange.calls + 1):
        refs = [method.remote(*own) for method, own in zip(methods, refs, strict=True)]
        if call == 0:
            _done(refs)
            start = time.perf_counter()
    _done(refs)
    return (time.perf_counter() - start) / exchange.calls


def ping_s(actors: list, *, calls: int) -> float:  # type: ignore[type-arg]
    """Seconds of a ping of all, the median of all but the first tenth."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        ray.get([actor.ping.remote() for actor in actors])
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[calls // 10 :])


def measure(exchange: Exchange) -> Timing:
    """Start the actors, measure, stop them."""
    ray.init(num_cpus=exchange.workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        actors = [ray.remote(Echo).remote() for _ in range(exchange.workers)]
        ray.get([actor.ping.remote() for actor in actors])
        pings: list[float] = []
        echoes: dict[str, list[float]] = {"one object": [], "object a column": []}
        for _ in turns(exchange.turns):
            pings.append(ping_s(actors, calls=exchange.pings))
            echoes["one object"].append(together_s(actors, exchange))
            echoes["object a column"].append(apart_s(actors, exchange))
    finally:
        ray.shutdown()
    return Timing(echo_s=echoes, ping_s=pings)


def _done(refs: list[list[ray.ObjectRef]]) -> None:
    flat = [ref for own in refs for ref in own]
    ray.wait(flat, num_returns=len(flat), fetch_local=False)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(Exchange()))))
