"""On this machine: calibrate, predict, run. PPO of three models, on three placements, with the real engines.

python -m benchmarks.mapping_measured       prints a table, writes benchmarks/results/mapping_measured.json

Every prediction is that of `rlhf map` for fixed pools: once by what `rlhf calibrate` says of this machine
before the runs, and once by that refined by the measurements of one of the nine runs (`rlhf calibrate
--from`), which is marked. Measured is the median iteration after the first. A device is a core: Colocated has
both for all models, Split one for each side. Standalone has four devices on the two cores; where more than
two of them work at a time, they are predicted to share the cores.

The order of two placements counts as predicted where the predictions differ by 5% at least.
"""

import json
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations, product
from pathlib import Path

from transformers import AutoConfig, AutoModelForSequenceClassification

from benchmarks import environments
from benchmarks.small_runs import quiet_trainer
from benchmarks.spread import machine
from rlhf_lightning.algos import PPO
from rlhf_lightning.callbacks import PredictedTimes
from rlhf_lightning.data import TaskData
from rlhf_lightning.mapping import hardware, measured
from rlhf_lightning.mapping.calibrate import measure, refine_by_run
from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.mapping.observe import recipe, shape_of
from rlhf_lightning.mapping.phases import Iteration
from rlhf_lightning.mapping.search import DeviceKind, Search, Sets
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping_inputs import read_dataflow
from rlhf_lightning.spec import EMBEDDED_DIRECTORY, Sampling
from rlhf_lightning.strategies import Colocated, Split, Standalone
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Reward, Settings

RESULT = Path(__file__).parent / "results" / "mapping_measured.json"
SIZES = {"1M": (128, 6), "4M": (256, 5), "12M": (384, 7)}
"""Hidden size and layers."""
TINY = {"0.1M": (64, 2), "0.3M": (96, 3)}
"""For a look at whether it runs."""
JUDGE = "-judge"
"""End of the name of a reward model's directory."""
CORES = 2
TIE = 1.05
"""Predictions whose ratio is below this are not told apart."""
REFINED_BY = "colocated"
"""Placement of the run of the middle size whose measurements refine the calibration."""
DIGITS = 24
PROMPT = DIGITS + len("Sort : ")
"""Tokens: one a character."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Rows and tokens of every run."""

    rows: int = 32
    """Prompts of an iteration."""
    updates: int = 2
    """Optimizer steps of an iteration."""
    response: int = 48
    """Most tokens of a response; models that have learned nothing hardly ever stop before."""
    iterations: int = 5
    """Iterations of a run, the first included."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run."""

    size: str
    """Name of the model."""
    strategy: str
    """Placement."""
    parameters: int
    """Of the actor."""
    seconds: float
    """Of the median iteration."""
    spread: tuple[float, float]
    """Of the shortest and the longest iteration."""
    calibrated: float
    """Predicted from `rlhf calibrate`."""
    refined: float
    """Predicted from `rlhf calibrate --from` one run."""
    phases: Mapping[str, tuple[float, float]]
    """By method: median measured, and what the calibration says of the work that was done."""


def write_model(directory: Path, hidden: int, layers: int) -> str:
    """A Llama of this size without weights, with the embedded tokenizer; beside it a reward model."""
    shutil.copytree(EMBEDDED_DIRECTORY, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 32, "num_key_value_heads": max(1, hidden // 64), "head_dim": 32,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    of_one = AutoConfig.from_pretrained(directory, num_labels=1)
    AutoModelForSequenceClassification.from_config(of_one).save_pretrained(f"{directory}{JUDGE}")
    return str(directory)


def algorithm(model: str, setting: Setting) -> PPO:
    """PPO with four models of one size that have learned nothing."""
    return PPO(
        actor=Actor(path=model, sampling=Sampling(max_new_tokens=setting.response)),
        reward=Reward(path=f"{model}{JUDGE}"),
        mini_batch_size=setting.rows // setting.updates,
    )


def strategies() -> dict[str, Strategy]:
    """The placements."""
    every = (Colocated(devices=CORES), Split(devices=CORES), Standalone(devices=4))
    return {strategy.strategy_name: strategy for strategy in every}


def predict(machine: Hardware, name: str, model: str, setting: Setting) -> float:
    """Seconds of an iteration, as `rlhf map` has them for this placement."""
    ppo = algorithm(model, setting)
    roles = {name: role.following(ppo.actor) for name, role in ppo.roles().items()}
    ppo.bind(roles)
    flow = read_dataflow(ppo, setting.rows)
    workload = replace(
        recipe(ppo.actor, Settings()), prompt=PROMPT, real_prompt=PROMPT, response=setting.response,
        batch=setting.rows, mini_batches=1,
    )  # fmt: skip
    shapes = {role: shape_of(roles[role]) for role in flow.roles}
    costs = SimulatedCosts(machine, flow, shapes, workload=workload, allows=Settings().training.allows)
    pools = strategies()[name].place(tuple(roles), strategies()[name].devices)
    sets: Sets = tuple(pool.roles for pool in pools)
    used = [pool.num_devices for pool in pools]
    kind = DeviceKind(costs, sum(used), tuple(sorted(set(used))))
    found = Search([kind], flow.roles).best_of(sets)
    assert found is not None
    work = zip(*([pool.devices * s for s in pool.seconds] for pool in found.pools), strict=True)
    return sum(max(stage, sum(work) / CORES) for stage, work in zip(found.stages, work, strict=True))


def run(strategy: Strategy, model: str, setting: Setting, *, cluster: Path, root: Path) -> list[Iteration]:
    """Train for some iterations; what each took, without the first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = PredictedTimes(str(cluster))
        trainer = quiet_trainer(strategy, root, steps=setting.iterations, callbacks=[watch])
        data = TaskData(
            batch_size=setting.rows, num_rows=setting.rows * setting.iterations, num_val_rows=1,
            min_digits=DIGITS, max_digits=DIGITS,
        )  # fmt: skip
        trainer.fit(algorithm(model, setting), datamodule=data)
    return measured.read(root)[1]


def phases(iterations: Sequence[Iteration], machine: Hardware) -> dict[str, tuple[float, float]]:
    """Medians by method."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in measured.observations(iterations):
        found.setdefault(one.name, []).append((one.seconds, one.predict(machine)))
    columns = {name: list(zip(*pairs, strict=True)) for name, pairs in found.items()}
    return {name: (statistics.median(a), statistics.median(b)) for name, (a, b) in columns.items()}


def measure_all(sizes: Mapping[str, tuple[int, int]], setting: Setting, directory: Path) -> list[Row]:
    """Calibrate, predict and run everything."""
    calibrated = measure(name="calibrated", devices=CORES)
    cluster = directory / "machine.yaml"
    hardware.save(calibrated, cluster)
    models = {size: write_model(directory / size, *how) for size, how in sizes.items()}
    took: dict[tuple[str, str], list[Iteration]] = {}
    for size, name in product(sizes, strategies()):
        root = directory / f"{size}-{name}"
        took[size, name] = run(strategies()[name], models[size], setting, cluster=cluster, root=root)
    refined = refine_by_run(calibrated, took[middle(list(sizes)), REFINED_BY])
    rows = []
    for (size, name), iterations in took.items():
        seconds = [one.seconds for one in iterations]
        rows.append(
            Row(
                size=size,
                strategy=name,
                parameters=shape_of(Actor(path=models[size])).num_parameters,
                seconds=statistics.median(seconds),
                spread=(min(seconds), max(seconds)),
                calibrated=predict(calibrated, name, models[size], setting),
                refined=predict(refined, name, models[size], setting),
                phases=phases(iterations, calibrated),
            )
        )
    return rows


def middle(sizes: Sequence[str]) -> str:
    """The size whose run refines."""
    return sizes[len(sizes) // 2]


def order(rows: Sequence[Row], column: str) -> dict[str, object]:
    """Whether a column of predictions has the placements of one model in the measured order.

    Args:
        rows: of one model.
        column: `calibrated` or `refined`.
    """
    pairs = [(a, b) for a, b in permutations(rows, 2) if getattr(b, column) > TIE * getattr(a, column)]
    wrong = [f"{a.strategy} < {b.strategy}" for a, b in pairs if a.seconds > b.seconds]
    by_seconds = [row.strategy for row in sorted(rows, key=lambda row: row.seconds)]
    predicted = [row.strategy for row in sorted(rows, key=lambda row: getattr(row, column))]
    return {"measured": by_seconds, "predicted": predicted, "pairs": len(pairs), "wrong": wrong}


def orders(rows: Sequence[Row]) -> dict[str, dict[str, object]]:
    """By column and model."""
    sizes = dict.fromkeys(row.size for row in rows)
    return {
        f"{size}, {column}": order([row for row in rows if row.size == size], column)
        for column, size in product(("calibrated", "refined"), sizes)
    }


def table(rows: Sequence[Row]) -> None:
    """Print rows, errors and orders."""
    print("model strategy      measured [range]        calibrated          refined by one run")
    fitted = (middle(list(dict.fromkeys(row.size for row in rows))), REFINED_BY)
    for row in rows:
        low, high = row.spread
        errors = [100 * (seconds / row.seconds - 1) for seconds in (row.calibrated, row.refined)]
        mark = "  fitted" if (row.size, row.strategy) == fitted else ""
        predicted = zip((row.calibrated, row.refined), errors, strict=True)
        numbers = "  ".join(f"{seconds:8.3f} ({error:+4.0f}%)" for seconds, error in predicted)
        measured_s = f"{row.seconds:8.3f} [{low:.3f} .. {high:.3f}]"
        print(f"{row.size:5s} {row.strategy:11s} {measured_s}  {numbers}{mark}")
    for name, found in orders(rows).items():
        print(f"order of {name}: {found}")


def main() -> None:
    """Measure, print, and write the result."""
    parser = environments.parser_of(__doc__)
    parser.add_argument(
        "--tiny", action="store_true", help="two tiny models, to see whether it runs; no result"
    )
    options = parser.parse_args()
    setting = Setting(rows=8, response=8, iterations=3) if options.tiny else Setting()
    before = machine()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure_all(TINY if options.tiny else SIZES, setting, Path(directory))
    table(rows)
    if not options.tiny:
        result = {
            "machine": before,
            "setting": asdict(setting),
            "rows": [asdict(row) for row in rows],
            "orders": orders(rows),
        }
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
