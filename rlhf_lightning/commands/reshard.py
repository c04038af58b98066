"""`rlhf reshard`: how the actor's weights get from training to generation, and what that costs each rank.

rlhf reshard --train 1,4,2 --generate 1,2 --model llama-7b     generation on the same devices
rlhf reshard --train 2,4,1 --apart 1,2,4 --model llama-7b      a generator of its own, on the next devices
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_lightning.commands import redistribution
from rlhf_lightning.commands.alike import alike
from rlhf_lightning.commands.blocks import MEANING, SIGNS, Blocks
from rlhf_lightning.commands.parser import Parser, check_picture, count
from rlhf_lightning.mapping import shapes
from rlhf_lightning.mapping.plan import LARGEST
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.parallel.layout import Generation, GenerationAxis, ParallelLayout
from rlhf_lightning.parallel.planners import PLANNERS
from rlhf_lightning.parallel.ranks import ranks_text
from rlhf_lightning.parallel.reshard import RankPlan, ReshardPlan, reshard
from rlhf_lightning.parallel.sharding import even_stages
from rlhf_lightning.parallel.weights import Bytes, Weights

MODEL = "llama-7b"
RULE = "hybridflow"
NODE = 8
BF16_BYTES = 2
GROUPED = 16
"""Ranks in a line of groups."""
AXES: dict[str, GenerationAxis] = {"generation tensor": "t", "generation pipeline": "p", "micro-DP": "micro"}
"""Names of the groups of ranks, and the axis of each."""


def run(arguments: Sequence[str]) -> None:
    """Plan, and write the answer to standard output.

    Raises:
        ValueError: an option is wrong, or the layout does not divide the model.
    """
    options = _parser().parse_args(arguments)
    _refuse_unread(options)
    options.rule, options.devices_per_node = options.rule or RULE, options.devices_per_node or NODE
    check_picture(options.picture)
    if options.apart:
        sys.stdout.write(_apart(options))
        return
    (p, t, d), (pg, tg) = options.train, options.generate
    rule = PLANNERS[options.rule].rule
    layout = ParallelLayout(p, t, d, order=options.order, generation=Generation(pg, tg, rule))
    if options.bytes:
        name, size_bytes = "a model", options.bytes
    else:
        shape = shapes.load(options.model)
        _check(shape, layout, "--train")
        even_stages(shape.layers, p)  # refuses empty ones
        name, size_bytes = shape.name, BF16_BYTES * shape.num_parameters
    plan = reshard(Weights.opaque(size_bytes, layout), layout, planner=options.rule)
    if options.picture:
        from rlhf_lightning.commands.reshard_picture import draw  # noqa: PLC0415

        draw(plan, Path(options.picture), title=_title(plan, name))
    sys.stdout.write(as_json(plan) + "\n" if options.json else as_text(plan, name))


def _refuse_unread(options: argparse.Namespace) -> None:
    """Refuse options that the chosen kind of transition does not read."""
    place = "--apart" if options.apart else "--generate"
    others = ("rule", "picture") if options.apart else ("devices_per_node",)
    if unread := [name for name in others if getattr(options, name)]:
        raise ValueError(
            f"--{unread[0].replace('_', '-')} {getattr(options, unread[0])}: nothing reads it with {place}. "
            "Leave it out."
        )


def _apart(options: argparse.Namespace) -> str:
    """The answer for a generator on devices of its own."""
    train, apart = (
        ParallelLayout(p, t, d, order=options.order) for p, t, d in (options.train, options.apart)
    )
    if options.bytes:
        name, size_bytes, layers = "a model", options.bytes, math.lcm(train.p, apart.p)
    else:
        shape = shapes.load(options.model)
        for layout, option in ((train, "--train"), (apart, "--apart")):
            _check(shape, layout, option)
        name, size_bytes, layers = shape.name, BF16_BYTES * shape.num_parameters, shape.layers
    plans = redistribution.planned(
        size_bytes, train, apart, layers=layers, devices_per_node=options.devices_per_node
    )
    if options.json:
        return redistribution.as_json(plans) + "\n"
    first, last = train.num_ranks, train.num_ranks + apart.num_ranks - 1
    title = (
        f"{name}, {_size(size_bytes)}: train (p={train.p}, t={train.t}, d={train.d}) on devices 0 to "
        f"{first - 1} -> generate (pg={apart.p}, tg={apart.t}, {apart.d} copies) on {first} to {last}"
    )
    return redistribution.as_text(plans, title, _size)


def as_json(plan: ReshardPlan) -> str:
    """As JSON: the groups; for each rank bytes received, at the peak, and held for training alone."""
    return json.dumps(
        {
            "gen_tp_groups": _groups(plan, "t"),
            "gen_pp_groups": _groups(plan, "p"),
            "micro_dp_groups": _groups(plan, "micro"),
            "volume_bytes": [_number(part.received_bytes) for part in plan.ranks],
            "peak_bytes": [_number(part.peak_bytes) for part in plan.ranks],
            "redundant_bytes": [_number(part.redundant_bytes) for part in plan.ranks],
        }
    )


def as_text(plan: ReshardPlan, name: str) -> str:
    """As text: the groups, a line for ranks that are alike, the worst rank, and HybridFlow's Table 2."""
    blocks = Blocks(plan)
    lines = [_title(plan, name), "", *(_groups_text(plan, label, axis) for label, axis in AXES.items())]
    rows = alike((part.rank, (f"|{blocks.text(part)}|", _sizes(_of(part)))) for part in plan.ranks)
    width = max(len("the model"), *(len(picture) for _, (picture, _) in rows))
    left = max(len("worst rank"), *(len(ranks) for ranks, _ in rows))
    heads = "".join(f"{head:>12}" for head in ("overlap", "volume", "peak", "redundant"))
    lines += ["", f"{'rank':>{left}}  {'the model':<{width}}{heads}"]
    lines += [f"{ranks:>{left}}  {picture:<{width}}{sizes}" for ranks, (picture, sizes) in rows]
    worst = [
        max(getattr(part, f"{column}_bytes") for part in plan.ranks)
        for column in ("received", "peak", "redundant")
    ]
    lines += [
        f"{'worst rank':>{left}}  {'':<{width}}{'':>12}{_sizes(worst)}",
        f"{'Table 2':>{left}}  {'':<{width}}{'':>12}{_sizes(plan.table)}",
        "",
        "   ".join(f"{SIGNS[kind]} {meaning}" for kind, meaning in MEANING.items()),
    ]
    return "\n".join(lines) + "\n"


def _title(plan: ReshardPlan, name: str) -> str:
    layout, generating = plan.layout, plan.layout.generating
    return (
        f"{name}, {_size(plan.weights.size_bytes)}: train (p={layout.p}, t={layout.t}, d={layout.d}) -> "
        f"generate (pg={generating.p}, tg={generating.t}, dg={generating.num_micro}), "
        f"{plan.planner}, order {layout.order}"
    )


def _groups(plan: ReshardPlan, axis: GenerationAxis) -> list[list[int]]:
    """The groups along an axis, sorted by their first ranks; the ranks of each in the order of the axis."""
    return sorted(plan.layout.generating.groups(axis))


def _groups_text(plan: ReshardPlan, label: str, axis: GenerationAxis) -> str:
    """A line of groups; of many the first ones, and how many more there are."""
    groups = _groups(plan, axis)
    shown: list[str] = []
    ranks = 0
    for group in groups:
        ranks += len(group)
        if shown and ranks > GROUPED:
            break
        shown.append(f"[{' '.join(map(str, group)) if len(group) <= GROUPED else ranks_text(group)}]")
    more = f" and {len(groups) - len(shown)} more" if len(groups) > len(shown) else ""
    return f"{label:<19} groups  {' '.join(shown)}{more}"


def _of(part: RankPlan) -> tuple[Bytes, ...]:
    return part.kept_bytes, part.received_bytes, part.peak_bytes, part.redundant_bytes


def _sizes(sizes: Sequence[Bytes]) -> str:
    return "".join(f"{_size(size):>12}" for size in sizes)


def _size(size_bytes: Bytes) -> str:
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= scale:
            return f"{float(size_bytes) / scale:.2f} {unit}"
    return f"{float(size_bytes):g} B"


def _number(size_bytes: Bytes) -> int | float:
    return size_bytes if isinstance(size_bytes, int) else float(size_bytes)


def _check(shape: ModelShape, layout: ParallelLayout, option: str) -> None:
    """Refuse tensor parallelism that does not divide the model, as Megatron does."""
    if not shape.divides(layout.t):
        below = max(t for t in range(1, layout.t) if shape.divides(t))
        above = next((str(t) for t in range(layout.t, shape.heads + 1) if shape.divides(t)), "")
        raise ValueError(
            f"{option} with t={layout.t}: {shape.name} has {shape.heads} heads, {shape.kv_heads} key-value "
            f"heads and feed-forward layers of {shape.intermediate}, which {layout.t} does not divide. "
            f"Try t={' or '.join(filter(None, (str(below), above)))}."
        )


def _counts(names: str, example: str) -> Callable[[str], tuple[int, ...]]:
    """The type of options that are whole numbers from 1 up, one for each of `names`, separated by commas."""

    def parse(text: str) -> tuple[int, ...]:
        words = text.split(",")
        if len(words) != len(names.split(",")) or not all(w.isdigit() and int(w) > 0 for w in words):
            raise argparse.ArgumentTypeError(
                f"{text} is not {names}, whole numbers from 1 up, such as {example}"
            )
        values = tuple(map(int, words))
        if (ranks := math.prod(values)) > LARGEST:
            raise argparse.ArgumentTypeError(
                f"{text} are {ranks:,} ranks, and the plan goes up to {LARGEST:,}. Type a smaller d: its "
                "replicas do the same."
            )
        return values

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = Parser("reshard", __doc__)
    add = parser.add_argument
    add("--train", type=_counts("p,t,d", "1,4,2"), required=True, help="p,t,d of training, such as 1,4,2")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--generate", type=_counts("pg,tg", "1,2"), help="pg,tg on the same devices, such as 1,2"
    )
    place.add_argument(
        "--apart", type=_counts("pg,tg,d", "1,2,4"), help="pg,tg and copies on other devices, such as 1,2,4"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--model", default=MODEL, help="a known name, or a Hugging Face config.json; in bf16")
    size.add_argument("--bytes", type=count, help="bytes of all parameters, in place of a model")
    add("--rule", choices=tuple(PLANNERS), help=f"with --generate: how weights are gathered ({RULE})")
    add("--order", choices=("tpd", "tdp"), default="tpd", help="axes of the ranks, fastest first")
    add("--devices-per-node", type=count, help=f"with --apart: neighbours that share a node ({NODE})")
    add("--json", action="store_true", help="the groups and the bytes of each rank as JSON")
    add("--picture", default="", help="with --generate: file (.png, .svg, .pdf) for a picture")
    return parser
