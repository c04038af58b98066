"""How the search for a mapping grows with devices and models, in seconds of one core.

python -m benchmarks.mapping_search       prints them, and draws docs/images/mapping-search.svg

Each request is PPO, or a constrained PPO with a cost model and its critic, on A100s with models of 70B, once
all equal and once of six sizes; or two models that both generate, one after the other, and learn. The search
is exact, whatever it takes. Writes results/mapping_search.json.
"""

import time
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import environments
from benchmarks.spread import machine
from rlhf_lightning.mapping import hardware, shapes
from rlhf_lightning.mapping.dataflow import Dataflow, Stage, Work
from rlhf_lightning.mapping.plan import plan
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.workload import Workload

ROLES = ("actor", "critic", "reference", "reward", "cost_critic", "cost")
TRAINED = ("actor", "critic", "cost_critic")
LAYERS = dict(zip(ROLES, (80, 40, 64, 48, 32, 72), strict=True))
"""Decoder layers of the models where they differ: from 28B to 69B."""
REQUESTS = (*((equal, n, 1) for equal in (True, False) for n in (2, 4, 6)), (True, 2, 2), (False, 2, 2))
"""Whether the models are equal, how many there are, and how many of them generate."""
DEVICES = (128, 256, 512, 1024)
ROWS = 1024
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "mapping-search.svg"


def costs(num_models: int, *, equal: bool, writers: int = 1) -> SimulatedCosts:
    """The first models of ROLES, of which the first ones generate."""
    roles = ROLES[:num_models]
    base = shapes.load("llama-70b")
    models = {r: base if equal else replace(base, layers=LAYERS[r]) for r in roles}
    flow = Dataflow(
        (
            *(Stage(f"generation {r}", (Work(r, "generate", ROWS, 1),)) for r in roles[:writers]),
            Stage("preparation", tuple(Work(r, "infer", ROWS, 1) for r in roles[writers:])),
            Stage("training", tuple(Work(r, "train", ROWS, 8) for r in roles if r in TRAINED)),
        )
    )
    return SimulatedCosts(hardware.A100, flow, models, workload=Workload())


def main() -> None:
    """Measure, draw, and write the result."""
    environments.parser_of(__doc__).parse_args()
    results: dict[str, dict[int, float]] = {}
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for equal, num_models, writers in REQUESTS:
        seconds = []
        name = f"{num_models} {'equal' if equal else 'different'} models"
        name += " that generate" * (writers > 1)
        for devices in DEVICES:
            started = time.process_time()
            found = plan(costs(num_models, equal=equal, writers=writers), devices).mappings[0]
            seconds.append(time.process_time() - started)
            print(
                f"{name} on {devices:>4} devices: {seconds[-1]:6.2f} s; {len(found.pools)} sets", flush=True
            )
        results[name] = dict(zip(DEVICES, seconds, strict=True))
        style = ":" if writers > 1 else "-" if equal else "--"
        axes.loglog(DEVICES, seconds, marker="o", label=name, linestyle=style)
    axes.set_xticks(DEVICES, [str(n) for n in DEVICES])
    axes.set_xlabel("devices")
    axes.set_ylabel("seconds on one core")
    axes.set_title("Exact search for the five best mappings of models up to 70B")
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE)
    result = {"machine": machine(), "seconds": results}
    print(f"written: {environments.write_result('mapping_search', result)}")


if __name__ == "__main__":
    main()
