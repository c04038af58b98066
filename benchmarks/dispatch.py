"""Our WorkerGroup and Batch beside verl's RayWorkerGroup and DataProto, in turns of seconds.

    python benchmarks/dispatch.py --rounds 3

Prints MB/s of a chained echo of 1024 x 1024 int64 x 4 columns on 4 workers, the time of a ONE_TO_ALL ping,
and ours over verl's with the spread over the rounds: against verl's defaults (blocking calls, torch encoding)
and against the best of its four ways to chain. Ray alone, with neither, is the bound. Writes
results/dispatch.json. In a round all systems are up at once; those that have no turn wait.
"""

import statistics
import sys
from pathlib import Path

import environments
from exchange import Exchange, Timing
from spread import machine, spread
from turns import in_turns

DEFAULT = "blocking, torch"
SCRIPTS = {"ray": "ray_dispatch.py", "verl": "peers/verl_dispatch.py", "ours": "ours_dispatch.py"}


def measure() -> dict[str, Timing]:
    """One round of "ray" (alone), "verl" and "ours", each in a process of its own, in turns."""
    commands = {}
    for system, script in SCRIPTS.items():
        interpreter = environments.python("verl") if system == "verl" else Path(sys.executable)
        commands[system] = (interpreter, environments.HERE / script)
    found = in_turns(commands)
    return {system: Timing(**timing) for system, timing in found.items()}  # type: ignore[arg-type]


def megabytes_per_s(exchange: Exchange, timing: Timing, *, cold: bool = False) -> dict[str, float]:
    """MB/s of each way to chain, by the median of the chains that count, or by the first chain."""
    counted = slice(0, 1) if cold else slice(exchange.warmup, None)
    return {
        way: exchange.size_bytes / 1e6 / statistics.median(seconds[counted])
        for way, seconds in timing.echo_s.items()
    }


def compared(exchange: Exchange, rounds: list[dict[str, Timing]]) -> dict[str, dict[str, float]]:
    """Ours over verl's, round by round: above 1 is better for ours in each of the three.

    Of pings the median over the turns, in each of which both had theirs.
    """
    ratios: dict[str, list[float]] = {"echo over default": [], "echo over best": [], "ping": []}
    for timings in rounds:
        ours = max(megabytes_per_s(exchange, timings["ours"]).values())
        verl = megabytes_per_s(exchange, timings["verl"])
        ratios["echo over default"].append(ours / verl[DEFAULT])
        ratios["echo over best"].append(ours / max(verl.values()))
        pings = zip(timings["verl"].ping_s, timings["ours"].ping_s, strict=True)
        ratios["ping"].append(statistics.median(verl / ours for verl, ours in pings))
    for name, values in ratios.items():
        print(f"ours / verl, {name}: {spread(values)}")
    return {name: spread(values).as_dict() for name, values in ratios.items()}


def main() -> None:
    """Measure in turns, print, and write the result."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    exchange = Exchange()
    rounds: list[dict[str, Timing]] = []
    for number in range(args.rounds):
        timings = measure()
        for system, timing in timings.items():
            warm, cold = (megabytes_per_s(exchange, timing, cold=cold) for cold in (False, True))
            ways = ", ".join(f"{way}: {rate:.0f} MB/s (cold {cold[way]:.0f})" for way, rate in warm.items())
            ping_ms = 1e3 * statistics.median(timing.ping_s)
            print(f"round {number + 1}, {system}: {ways}; ping {ping_ms:.2f} ms", flush=True)
        rounds.append(timings)
    result = {
        "machine": machine(),
        "exchange": vars(exchange),
        "rounds": [{system: vars(timing) for system, timing in timings.items()} for timings in rounds],
        "ratios": compared(exchange, rounds),
    }
    print(f"written: {environments.write_result('dispatch', result)}")


if __name__ == "__main__":
    main()
