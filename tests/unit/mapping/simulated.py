"""Dataflows, models and hardware that the tests of the mapping search over."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from rlhf_lightning.mapping import hardware, shapes
from rlhf_lightning.mapping.dataflow import Dataflow, Stage, Work
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.workload import Workload

ROLES = ("actor", "critic", "reference", "reward")
SEVEN = shapes.load("llama-7b")


def flow_of(rows: int, *, updates: int = 8, roles: Sequence[str] = ROLES) -> Dataflow:
    """PPO of some of its roles."""
    scored = [Work(role, "infer", rows, 1) for role in roles if role != "actor"]
    trained = [Work(role, "train", rows, updates) for role in roles if role in ("actor", "critic")]
    stages = [
        ("generation", [Work("actor", "generate", rows, 1)]),
        ("preparation", scored),
        ("training", trained),
    ]
    return Dataflow(tuple(Stage(name, tuple(work)) for name, work in stages if work))


def random_case(seed: int) -> tuple[SimulatedCosts, int]:
    """Models, hardware and work drawn at random, with memory about as large as the models need."""
    draw = random.Random(seed)  # noqa: S311
    roles = ROLES[: draw.randint(2, 4)]
    devices = draw.choice([4, 8, 16])
    drawn = {
        role: ModelShape(
            name=role,
            layers=draw.choice([2, 6]),
            hidden=64 * draw.choice([8, 32, 64]),
            intermediate=1024 * draw.choice([1, 8]),
            heads=2,
            kv_heads=draw.choice([1, 2]),
            vocab=draw.choice([1000, 50000]),
        )
        for role in roles
    }
    needed = sum(16 * shape.num_parameters for shape in drawn.values()) / devices
    cluster = replace(
        hardware.A100,
        gpus_per_node=draw.choice([2, 4, 8]),
        memory_bytes=needed * draw.uniform(0.7, 5) + 1e9,
        memory_bandwidth=2e12 * draw.uniform(0.05, 2),
        peak_flops=3e14 * draw.uniform(0.05, 2),
        intra_bandwidth=3e11 * draw.uniform(0.01, 1),
        inter_bandwidth=2.5e10 * draw.uniform(0.01, 1),
    )
    rows = draw.choice([16, 96, 256])
    lengths = draw.choice([(), (16, 40, 64)])
    workload = Workload(
        prompt=64,
        response=64,
        lengths=lengths,
        batch=rows,
        offload=draw.random() < 0.3,
        max_resident=draw.choice([0, 8]),
    )
    return SimulatedCosts(cluster, flow_of(rows, updates=4, roles=roles), drawn, workload=workload), devices


def costs_of(shape: ModelShape = SEVEN, *, offload: bool = False, one_stage: bool = False) -> SimulatedCosts:
    """PPO of four models of one shape on nodes of six GPUs."""
    models = dict.fromkeys(ROLES, shape) | {"critic": shape.with_head("scalar")}
    workload = Workload(offload=offload, one_stage=one_stage)
    cluster = replace(hardware.A100, gpus_per_node=6)
    return SimulatedCosts(cluster, flow_of(1024), models, workload=workload)
