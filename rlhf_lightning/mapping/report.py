"""A plan as text, as JSON, and as the YAML configuration that runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_lightning.mapping.plan import Plan, Task
from rlhf_lightning.mapping.search import DeviceMapping, Pool
from rlhf_lightning.parallel.layout import ParallelLayout

GB = 1e9
BF16_BYTES = 2


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    algorithm: str
    """Short name or class path."""
    models: Mapping[str, str]
    """Known name or directory of each role's model; empty for a reward of functions."""
    strategy: str
    """Short name of the strategy that runs a mapping."""
    pick: int = 1
    """Which mapping is configured, from 1, the best."""


def as_json(plan: Plan, mapping: DeviceMapping) -> str:
    """A mapping and the baselines.

    Keys: `mapping` (a list of sets: `roles`, `devices`, `hardware`, and `layouts` by role and stage),
    `iteration_s`, `tokens_per_s`, `stages_s` by stage, `memory_gb` (for each set, by stage, of a device),
    `search_s`, and `baselines` (tokens/s by name, null where it does not fit).
    """
    return json.dumps(
        {
            "mapping": [_set(plan, pool) for pool in mapping.pools],
            "iteration_s": mapping.seconds,
            "tokens_per_s": plan.tokens_per_s(mapping),
            "stages_s": dict(zip(plan.stages, mapping.stages, strict=True)),
            "memory_gb": [{k: v / GB for k, v in memory(plan, pool).items()} for pool in mapping.pools],
            "search_s": plan.search_s,
            "baselines": {n: None if m is None else plan.tokens_per_s(m) for n, m in plan.baselines.items()},
        },
        indent=2,
    )


def _set(plan: Plan, pool: Pool) -> dict[str, object]:
    layouts: dict[str, dict[str, dict[str, object]]] = {role: {} for role in pool.roles}
    for task in plan.tasks(pool):
        layouts[task.role][task.stage] = {
            **_numbers(task, pool.at[task.role]), "seconds": task.seconds, "bound": task.bound,
        }  # fmt: skip
    placed = {"roles": list(pool.roles), "devices": pool.devices, "hardware": plan.hardware(pool)}
    return {**placed, "layouts": layouts}


def _numbers(task: Task, layout: ParallelLayout) -> dict[str, object]:
    numbers: dict[str, object] = {"p": layout.p, "t": layout.t, "d": layout.d}
    if task.work.kind == "generate":
        numbers |= {"pg": layout.generating.p, "tg": layout.generating.t}
    return numbers


def memory(plan: Plan, pool: Pool) -> dict[str, float]:
    """Most bytes on a device of a pool in each stage; where the pool idles, those that stay."""
    costs = plan.costs_on(pool)
    idle = sum(costs.resident(role, layout) for role, layout in pool.at.items())
    used = dict.fromkeys(plan.stages, idle)
    for task in plan.tasks(pool):
        used[task.stage] = max(used[task.stage], task.memory_bytes)
    return used


def as_text(plan: Plan, request: Request) -> str:
    """Tables of the mappings, the YAML of the one that was picked, and the comparison."""
    workload, flow = plan.costs.workload, plan.costs.dataflow
    lines = [
        f"{request.algorithm} on {plan.cluster}: "
        + ", ".join(f"{role} {plan.costs.shapes[role].name}" for role in plan.costs.roles),
        f"{flow.rows} rows of {workload.prompt} + {workload.response} tokens; "
        f"searched {len(plan.costs.roles)} models in {plan.search_s:.2f} s",
    ]
    lines += [replicas] if (replicas := only_replicas(plan)) else []
    for rank, mapping in enumerate(plan.mappings, start=1):
        lines += ["", *table(plan, mapping, rank)]
        if rank == request.pick:
            lines += ["", *(f"    {line}" for line in as_yaml(plan, mapping, request).splitlines())]
    if request.pick == 1 and len(plan.mappings) > 1:
        lines += ["", "    --pick 2 shows and writes the configuration of #2, and so on"]
    best = plan.tokens_per_s(plan.mappings[0])
    lines += ["", "compared with, each at its best allocation and layouts:"]
    for name, compared in plan.baselines.items():
        if compared is None:
            lines.append(f"  {name:<12} does not fit")
        else:
            tokens = plan.tokens_per_s(compared)
            lines.append(
                f"  {name:<12} {tokens:>9,.0f} tokens/s   the best mapping is {best / tokens:.2f} x as fast"
            )
    return "\n".join(lines) + "\n"


def only_replicas(plan: Plan) -> str:
    """That every model trains on FSDP, in replicas of the whole, and why; empty where Megatron takes them."""
    why = plan.costs.undivided
    return f"no tensor shards and stages, but replicas on FSDP: {why}" if why else ""


def table(plan: Plan, mapping: DeviceMapping, rank: int) -> list[str]:
    """Lines of one mapping: for each model its devices, and by stage its layout, seconds and memory."""
    stages = ", ".join(f"{n} {digits(s)} s" for n, s in zip(plan.stages, mapping.stages, strict=True))
    tokens = plan.tokens_per_s(mapping)
    width = max(9, *(len(_devices(plan, pool)) + 2 for pool in mapping.pools))
    columns = f"{'model':<14}{'stage':<15}{'layout':<28}{'seconds':>8}{'GB/device':>11}  bound"
    lines = [
        f"#{rank}  {digits(mapping.seconds)} s an iteration, {tokens:,.0f} tokens/s: {stages}",
        f"    {'devices':<{width}}{columns}",
    ]
    for pool in mapping.pools:
        for i, task in enumerate(plan.tasks(pool)):
            lines.append(
                f"    {_devices(plan, pool) if i == 0 else '':<{width}}{task.role:<14}{task.stage:<15}"
                f"{layout_text(pool.at[task.role], generating=task.work.kind == 'generate'):<28}"
                f"{digits(task.seconds):>8}{task.memory_bytes / GB:>11.1f}  {task.bound}"
            )
    lines += [text for pool in mapping.pools for text in _uncalled(plan, pool)]
    return lines + [f"    {text} stay idle" for text in _idle(plan, mapping)]


def _uncalled(plan: Plan, pool: Pool) -> list[str]:
    """Lines of the models that no step calls: they take memory alone."""
    costs = plan.costs_on(pool)
    return [
        f"    {role}, which no step calls, takes {costs.resident(role, layout) / GB:.1f} GB on each of "
        f"{_devices(plan, pool)} devices ({layout.sizes})"
        for role, layout in pool.at.items()
        if role not in costs.dataflow.roles
    ]


def _devices(plan: Plan, pool: Pool) -> str:
    """A pool's devices in words: how many, and of which kind where there are several."""
    return f"{pool.devices} x {plan.hardware(pool)}" if len(plan.clusters) > 1 else str(pool.devices)


def _idle(plan: Plan, mapping: DeviceMapping) -> list[str]:
    """Devices that no model stands on, by kind."""
    found = []
    for kind, (costs, devices) in enumerate(plan.clusters):
        left = devices - sum(pool.devices for pool in mapping.pools if pool.kind == kind)
        if left:
            found.append(f"{left} x {costs.hardware.name}" if len(plan.clusters) > 1 else f"{left} devices")
    return found


def digits(seconds: float) -> str:
    """Seconds with one decimal from 10 s on, two from 1 s, else three."""
    return f"{seconds:.{1 if seconds >= 10 else 2 if seconds >= 1 else 3}f}"


def layout_text(layout: ParallelLayout, *, generating: bool) -> str:
    """`p1 t8 d2`, and `-> pg1 tg2 dg4` where the model generates."""
    return f"{layout.sizes} -> {layout.generating.sizes}" if generating else layout.sizes


def as_yaml(plan: Plan, mapping: DeviceMapping, request: Request) -> str:
    """The configuration that runs a mapping."""
    lines = ["algo:", f"  class_path: {request.algorithm}", "  init_args:"]
    workload = plan.costs.workload
    how = ", dtype: bfloat16" if workload.element == BF16_BYTES else ""
    how += ", gradient_checkpointing: true" if workload.recompute else ""
    lines += [
        f"    {role}: {{path: {json.dumps(source)}{how}}}"
        for role, source in request.models.items()
        if source
    ]
    return "\n".join([*lines, *_strategy(plan, mapping, request)]) + "\n"


def _strategy(plan: Plan, mapping: DeviceMapping, request: Request) -> list[str]:
    """The part of the configuration that differs between mappings."""
    total = sum(pool.devices for pool in mapping.pools)
    lines = ["strategy:", f"  class_path: {request.strategy}", "  init_args:", f"    devices: {total}"]
    workload = plan.costs.workload
    at_once = f"max_tokens_per_micro_batch: {workload.micro_batch_tokens}"
    settings = [f"train: {{{at_once}}}"]
    if any(map(_is_divided, (layout for pool in mapping.pools for layout in pool.layouts))):
        shared = str(workload.sharding == "states").lower()
        settings = ["engine: megatron", f"megatron: {{distributed_optimizer: {shared}, {at_once}}}"]
    # No generation engine may admit more rows than the prediction has room for, and one number is for all.
    bounds = [task.rows_at_once for pool in mapping.pools for task in plan.tasks(pool)]
    if slots := min(filter(None, bounds), default=0):
        settings.append(f"generate: {{slots: {slots}}}")
    lines += [f"    settings: {{{', '.join(settings)}}}", "    mapping:", "      pools:"]
    placed = {role for pool in mapping.pools for role in pool.roles}
    for pool in mapping.pools:
        # Roles that have no model (a reward of functions) join the first pool.
        others = [r for r in request.models if r not in placed and pool is mapping.pools[0]]
        roles = [*(role for role in request.models if role in pool.roles), *others]
        where = f"  # {plan.hardware(pool)}" if len(plan.clusters) > 1 else ""
        lines += [f"        - roles: [{', '.join(roles)}]", f"          devices: {pool.devices}{where}"]
        divided = {role: layout for role, layout in pool.at.items() if _is_divided(layout)}
        lines += ["          sizes:"] if divided else []
        lines += [f"            {role}: {_sizes(layout)}" for role, layout in divided.items()]
    return lines


def _is_divided(layout: ParallelLayout) -> bool:
    return layout.p * layout.t > 1


def _sizes(layout: ParallelLayout) -> str:
    """The sizes of one role in YAML."""
    sizes = layout.generation
    generate = f", generate: {{p: {sizes.p}, t: {sizes.t}}}" if sizes else ""
    return f"{{p: {layout.p}, t: {layout.t}{generate}}}"
