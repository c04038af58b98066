"""`rlhf map`: where should the models of an algorithm run on a cluster, how long does it take, and why?

rlhf map --algo ppo --devices 128 --hardware a100-80gb --model llama-7b --reward llama-70b
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.commands.parser import Parser, check_picture, check_place, count
from rlhf_lightning.engines import has_tokenizer
from rlhf_lightning.mapping import cluster, hardware, report, shapes
from rlhf_lightning.mapping.dataflow import Dataflow, Stage
from rlhf_lightning.mapping.picture import draw
from rlhf_lightning.mapping.plan import Plan, plan
from rlhf_lightning.mapping.search import DeviceMapping, Sets
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.mapping_inputs import read_dataflow
from rlhf_lightning.names import FOLDERS, class_path
from rlhf_lightning.spec import EMBEDDED, ModelSpec
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Judge, Tool

NO_MODEL = "none"
"""Typed instead of a model for a reward or a cost of functions only."""


def run(arguments: Sequence[str]) -> None:
    """Search for the best mappings, and write them to standard output and to files.

    Raises:
        ValueError: an option is wrong, or the models do not fit; the message says what is missing.
    """
    algorithm, options = _parse(arguments)
    sources = _sources(algorithm, options)
    for role, model in algorithm.placed().items():
        if not sources[role] and not isinstance(model, Judge | Tool):
            option = role if vars(options).get(role) else "model"
            raise ValueError(
                f"--{option} {NO_MODEL}: {role} is a model, and only rewards and costs can be functions "
                f"alone. Type --{option} with a known name or a config.json."
            )
    check_place("yaml", options.yaml)
    check_picture(options.picture)
    found = search(algorithm, sources, options)
    mapping = _picked(found, options.pick)
    mapped = importlib.import_module(FOLDERS["strategy"]).MAPPED
    request = report.Request(options.algo, sources, mapped, options.pick)
    sys.stdout.write(
        report.as_json(found, mapping) + "\n" if options.json else report.as_text(found, request)
    )
    if options.yaml:
        text = report.as_yaml(found, mapping, request)
        heading = _heading(found, algorithm, options, models=sources.values())
        Path(options.yaml).write_text(f"{heading}\n{text}", encoding="utf-8")
        sys.stderr.write(f"rlhf: wrote {options.yaml}, #{options.pick}; its first lines say how to run it.\n")
    if options.picture:
        title = f"{options.algo}, {options.model}, {found.cluster}"
        draw(found, mapping, Path(options.picture), title=title)


def _sources(algorithm: RLHFAlgorithm, options: argparse.Namespace) -> dict[str, str]:
    """What stands for each model; empty for functions, which some roles are by default.

    These are tools, rewards that no step calls, and those whose own method reads no prompts.
    """
    found, uncalled = {}, algorithm.uncalled()
    for name, role in algorithm.placed().items():
        functions = isinstance(role, Judge) and (name in uncalled or not role.reads_prompts)
        default = NO_MODEL if functions or isinstance(role, Tool) else options.model
        source = vars(options).get(name) or default
        found[name] = "" if source == NO_MODEL else source
    return found


def _picked(found: Plan, pick: int) -> DeviceMapping:
    """The mapping that was picked.

    Raises:
        ValueError: there are fewer.
    """
    if pick > len(found.mappings):
        raise ValueError(
            f"--pick {pick}: there are only {len(found.mappings)} mappings. Try --pick {len(found.mappings)}."
        )
    return found.mappings[pick - 1]


def _heading(
    found: Plan, algorithm: RLHFAlgorithm, options: argparse.Namespace, *, models: Iterable[str]
) -> str:
    """What stands above the configuration: the command, and what the file does not hold."""
    sizes = " and ".join(model for model in dict.fromkeys(models) if model in shapes.KNOWN)
    replace_them = f"# Replace {sizes}, a size only, by a model: its directory or hub name.\n" * bool(sizes)
    every = [work for stage in found.costs.dataflow.stages for work in stage.work]
    updates = [(work.calls, math.ceil(work.rows / work.calls)) for work in every if work.kind == "train"]
    number, rows = max(updates, default=(0, 0))
    size = f"{math.ceil(rows / 2)} pairs" if _in_pairs(algorithm) else f"{rows} rows"
    drawing = [work.role for work in every if work.kind == "generate"]
    limit = f"algo.{drawing[0]}.sampling.max_new_tokens" if drawing else "data.max_response_tokens"
    replicas = report.only_replicas(found)
    return (
        f"# rlhf fit -c {options.yaml} --data ...\n"
        f"{replace_them}# Predicted for --data.batch_size {options.batch} "
        f"--data.max_prompt_tokens {options.prompt} --{limit} {options.response}\n"
        f"# in {number} updates of {size} (--algo.mini_batch_size)" + (f"\n# {replicas}" if replicas else "")
    )


def _in_pairs(algorithm: RLHFAlgorithm) -> bool:
    return algorithm.in_pairs or algorithm.needs_pairs  # which one's own says of a loss that `step` makes


def search(algorithm: RLHFAlgorithm, sources: Mapping[str, str], options: argparse.Namespace) -> Plan:
    """Read the algorithm's dataflow, and search for its best mappings.

    Args:
        algorithm: whose models are placed.
        sources: by role, a known name or a directory; empty for functions.
        options: the options that were typed.

    Raises:
        ValueError: hardware or a model is unknown, or the models do not fit.
    """
    kinds = cluster.load(options.hardware, options.devices)
    roles = algorithm.placed()
    loaded = {n: shapes.load(source, head=roles[n].head) for n, source in sources.items() if source}
    whole = any(shape.undivided for shape in loaded.values())
    rows = options.batch * (2 if algorithm.needs_pairs else 1)
    updates = min(options.updates, options.batch) if _in_pairs(algorithm) else options.updates
    workload = Workload(
        prompt=options.prompt,
        response=options.response,
        batch=rows,
        mini_batches=1,
        real_prompt=options.real_prompt,
        max_resident=options.max_resident,
        sharding="full" if whole else "states",
        held_once=whole,  # else its YAML asks for Megatron's distributed optimizer
        keeps_gradients=not whole,
    )
    algorithm.bind({n: replace(role, path=_readable(sources[n])) for n, role in roles.items()})
    flow = with_updates(read_dataflow(algorithm, rows), updates)
    recipes = {n: replace(workload, follows=r.weights_change and not r.trains) for n, r in roles.items()}
    every = [
        (SimulatedCosts(on, flow, loaded, workload=workload, recipes=recipes), devices)
        for on, devices in kinds
    ]
    compared, most = baselines(every[0][0].roles), max(options.top, options.pick)
    return plan(*every[0], baselines=compared, count=most, others=every[1:])


def _readable(source: str) -> str:
    """What stands for a model in the step that is read: the embedded one where it has no tokenizer."""
    whole = Path(source).is_dir() and has_tokenizer(ModelSpec(path=source))
    return source if whole or not source else EMBEDDED


def with_updates(flow: Dataflow, updates: int) -> Dataflow:
    """The dataflow with `updates` optimizer steps for each model that has one over all its rows."""

    def stage(old: Stage) -> Stage:
        once = [w for w in old.work if w.kind == "train" and w.calls == 1]
        return replace(
            old, work=tuple(replace(w, calls=min(updates, w.rows)) if w in once else w for w in old.work)
        )

    return Dataflow(tuple(stage(old) for old in flow.stages))


def baselines(roles: Sequence[str]) -> dict[str, Sets]:
    """The placement of each strategy with a fixed one, by the strategy's name."""
    found: dict[str, Sets] = {}
    kinds: Sequence[type[Strategy]] = importlib.import_module(FOLDERS["strategy"]).FIXED
    for kind in kinds:
        pools = kind().place(roles, None)
        found[kind.strategy_name] = tuple(pool.roles for pool in pools)
    return found


def _parse(arguments: Sequence[str]) -> tuple[RLHFAlgorithm, argparse.Namespace]:
    """The algorithm and the options; the algorithm is read first, since each of its roles has an option."""
    first = Parser("map", add_help=False)
    first.add_argument("--algo")
    name = first.parse_known_args(arguments)[0].algo
    if name is None:
        _parser(()).parse_args(arguments)
    algorithm = _algorithm(class_path("algo", name))
    roles = tuple(role for role in algorithm.placed() if role != "actor")
    options, unknown = _parser(roles).parse_known_args(arguments)
    if unknown:
        flags = ", ".join(f"--{role.replace('_', '-')}" for role in roles) or "no other model"
        raise ValueError(
            f"{' '.join(unknown)}: unknown. Beside --model, {name} has {flags}; --help lists the rest."
        )
    return algorithm, options


def _algorithm(path: str) -> RLHFAlgorithm:
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as err:
        raise ValueError(f"--algo {path}: cannot be imported ({err}).") from err
    if not (isinstance(found, type) and issubclass(found, RLHFAlgorithm)):
        raise ValueError(f"--algo {path}: is not an RLHFAlgorithm.")
    try:
        return found()
    except TypeError as err:
        raise ValueError(f"--algo {path}: has options without a default ({err}). Give them one.") from err


def _source(text: str) -> str:
    """The type of options that name a model: of a config.json the directory, which is what a run reads."""
    path = Path(text)
    return str(path.parent) if path.name == "config.json" and path.is_file() else text


def _parser(roles: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with an option for the model of each role."""
    parser = Parser("map", __doc__)
    add = parser.add_argument
    add("--algo", required=True, help="short name of an algorithm, or the class path of your own")
    add("--devices", type=count, help="devices of the cluster, unless --hardware says it")
    add(
        "--hardware",
        default="a100-80gb",
        help=f"{', '.join(hardware.KNOWN)}, or a YAML file as `rlhf calibrate` writes it "
        "(default %(default)s); of several kinds a100-80gb:16,h100-80gb:8",
    )
    add(
        "--model",
        type=_source,
        required=True,
        help=f"the actor's: {', '.join(shapes.KNOWN)}, or a Hugging Face config.json",
    )
    for role in roles:
        add(
            f"--{role.replace('_', '-')}",
            dest=role,
            type=_source,
            default="",
            help=f"the {role}'s model where it is another; none: functions",
        )
    for name, kind, default, words in (
        ("--prompt", count, 1024, "width of the prompts, tokens (%(default)s)"),
        ("--real-prompt", float, 0.0, "mean tokens of a prompt; by default a quarter of --prompt"),
        ("--response", count, 1024, "most tokens of a response (%(default)s)"),
        ("--batch", count, 1024, "prompts, or pairs, of an iteration (%(default)s)"),
        ("--updates", count, 8, "optimizer steps of an iteration, at most one a row or pair (%(default)s)"),
        ("--max-resident", int, 256, "sequences that are decoded at once (%(default)s; 0: as many as fit)"),
        ("--top", count, 5, "how many mappings to find (%(default)s)"),
        ("--pick", count, 1, "the one that is written: 1 is the best, 2 the next (1)"),
        ("--yaml", str, "", "file for the configuration that runs the mapping"),
        ("--picture", str, "", "file (.png, .svg, .pdf) for a picture of the mapping over time"),
    ):
        add(name, type=kind, default=default, help=words)
    add("--json", action="store_true", help="the mapping as JSON")
    return parser
