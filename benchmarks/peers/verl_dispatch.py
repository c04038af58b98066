"""verl 0.9.1: a DP_COMPUTE_PROTO echo chained through a RayWorkerGroup, and a ONE_TO_ALL ping.

verl chains calls in two ways, blocking (its default: every output returns to the driver) and with futures
(`blocking=False`), and encodes a DataProto in two ways (torch, its default, or numpy, by a variable of the
process). All four are measured on the same workers.
"""

import dataclasses
import json
import os
import statistics
import time

import ray
import torch
from exchange import Exchange, Timing
from turns import turns
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

ENCODING = "VERL_DATAPROTO_SERIALIZATION_METHOD"


class Echo(Worker):
    """A worker that returns what it gets."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        """Return the rows of this rank, through the driver."""
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo_future(self, data: DataProto) -> DataProto:
        """Return the rows of this rank as a future."""
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        """Return the rank."""
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def encode_with(self, encoding: str) -> None:
        """Choose how this worker encodes a DataProto: "torch" or "numpy"."""
        os.environ[ENCODING] = encoding


def echo_s(group: RayWorkerGroup, exchange: Exchange, *, blocking: bool) -> float:
    """Seconds of one of `exchange.calls` chained echoes."""
    method = group.echo if blocking else group.echo_future
    data = _done(method(_batch(exchange)))
    start = time.perf_counter()
    for _ in range(exchange.calls):
        data = method(data)
    _done(data)
    return (time.perf_counter() - start) / exchange.calls


def ping_s(group: RayWorkerGroup, *, calls: int) -> float:
    """Seconds of a ping, the median of all but the first tenth."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        group.ping()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[calls // 10 :])


def measure(exchange: Exchange) -> Timing:
    """Start the workers, measure every way of chaining, stop them."""
    ray.init(num_cpus=exchange.workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        pool = RayResourcePool([exchange.workers], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Echo)))
        pings: list[float] = []
        echoes: dict[str, list[float]] = {}
        for _ in turns(exchange.turns):
            pings.append(ping_s(group, calls=exchange.pings))
            for encoding in ("torch", "numpy"):
                os.environ[ENCODING] = encoding
                group.encode_with(encoding)
                for way, blocking in (("blocking", True), ("futures", False)):
                    seconds = echo_s(group, exchange, blocking=blocking)
                    echoes.setdefault(f"{way}, {encoding}", []).append(seconds)
    finally:
        ray.shutdown()
    return Timing(echo_s=echoes, ping_s=pings)


def _batch(exchange: Exchange) -> DataProto:
    """`columns` int64 columns of [rows, width]."""
    values = torch.arange(exchange.rows * exchange.width).view(exchange.rows, exchange.width)
    return DataProto.from_dict({f"column_{index}": values + index for index in range(exchange.columns)})


def _done(data: DataProto | DataProtoFuture) -> DataProto | DataProtoFuture:
    """Wait for futures without fetching what they hold."""
    if isinstance(data, DataProtoFuture):
        ray.wait(data.futures, num_returns=len(data.futures), fetch_local=False)
    return data


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(Exchange()))))
